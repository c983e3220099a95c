"""Half an hour of mixed load on a stack, and whether resident memory stays where it was after the first minutes.

Uploads of new and known videos, questions of every draft mode, sampling, cancelled answers, wrong requests. JSON on
stdout: per service the memory after the first minutes, its largest and last, and how much the last is above the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

from bench.world import held_out, write_mp4
from foveate.checkpoints import default_checkpoint
from foveate.client import Client, DraftMode
from foveate.rpc.errors import FoveateError
from foveate.stack import Stack, StackConfig

_SAMPLE_S = 5.0
_QUESTIONS = ("Describe the video.", "How many objects are there?", "Which colours are there?")


def main() -> int:
    """Runs the load and prints one JSON object; returns 0 when every service stayed within the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--settle-minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.05)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Stack(StackConfig(default_checkpoint(), pool_mib=64)) as stack:
        result = soak(stack, _videos(Path(folder)), options)
    print(json.dumps(result))
    return int(not result["is_flat"])


def soak(stack: Stack, videos: list[bytes], options: argparse.Namespace) -> dict[str, object]:
    """Loads a stack for `options.minutes` and returns what memory did."""
    end_s = time.monotonic() + options.minutes * 60
    settled_s = time.monotonic() + options.settle_minutes * 60
    done: Counter[str] = Counter()
    threads = [
        threading.Thread(target=_load, args=(stack.addresses.gateway, videos, seed, end_s, done))
        for seed in range(options.clients)
    ]
    for thread in threads:
        thread.start()
    samples: dict[str, list[float]] = {process.name: [] for process in stack.processes}
    while any(thread.is_alive() for thread in threads):
        time.sleep(_SAMPLE_S)
        stack.check()
        if time.monotonic() >= settled_s:
            for process in stack.processes:
                samples[process.name].append(psutil.Process(process.pid).memory_full_info().uss / 2**20)
    services = {name: _summary(values) for name, values in samples.items()}
    is_flat = all(summary["growth"] <= options.tolerance for summary in services.values())
    return {"minutes": options.minutes, "done": dict(done), "uss_mib": services, "is_flat": is_flat}


def _load(address: str, videos: list[bytes], seed: int, end_s: float, done: Counter[str]) -> None:
    chance = random.Random(seed)
    with Client(address, timeout_s=60) as client:
        while time.monotonic() < end_s:
            try:
                done[_one(client, videos, chance)] += 1
            except FoveateError as error:
                done[error.reason] += 1


def _one(client: Client, videos: list[bytes], chance: random.Random) -> str:
    """Does one thing that clients do; returns its name."""
    context = client.create_context_from_bytes(chance.choice(videos), fps=chance.choice((2.0, 4.0)))
    question, draft = chance.choice(_QUESTIONS), chance.choice((None, DraftMode.OFF, DraftMode.NGRAM))
    kind = chance.choice(("answer", "answer", "sampled", "cancelled", "wrong", "deleted"))
    if kind == "answer":
        client.ask(context, question, draft=draft, max_tokens=64)
    elif kind == "sampled":
        client.ask(context, question, draft=draft, temperature=1.0, seed=chance.randrange(2**32), max_tokens=64)
    elif kind == "cancelled":
        with client.stream(context, question, temperature=5.0, seed=1, max_tokens=200) as stream:
            next(stream)
    elif kind == "wrong":
        client.ask(context, "", max_tokens=-1)
    else:
        with contextlib.suppress(FoveateError):
            client.delete_context(context)
    return kind


def _summary(values: list[float]) -> dict[str, float]:
    """Compares the means of the first and the last tenth: a single sample may hit a large upload."""
    if not values:
        sys.stderr.write("no sample after settling: raise --minutes\n")
        return {"first": 0.0, "last": 0.0, "largest": 0.0, "growth": 1.0}
    tenth = max(1, len(values) // 10)
    first, last = statistics.mean(values[:tenth]), statistics.mean(values[-tenth:])
    return {
        "first": round(first, 1),
        "last": round(last, 1),
        "largest": round(max(values), 1),
        "growth": round(last / first - 1, 4),
    }


def _videos(folder: Path) -> list[bytes]:
    made = []
    for index in range(6):
        path = folder / f"{index}.mp4"
        write_mp4(held_out("describe", index, num_frame_pairs=4 + 4 * index).world, path, fps=4.0)
        made.append(path.read_bytes())
    return made


if __name__ == "__main__":
    raise SystemExit(main())
