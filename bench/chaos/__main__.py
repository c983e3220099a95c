"""Real processes, real Redis, real faults, answers under load: each is right, or an error that says to try again.

    clients -> proxy -> gateway A, B -> proxies -> verifier A, B, drafter      TLS with certificates on every hop
                                  \\-> proxy -> Redis <-/

Gateway A is told where the others are, gateway B finds them in Redis, where they register.

Answers are compared with the text they have undisturbed (deterministic kernels). A client does what docs/clients.md
says: on UNAVAILABLE it waits and tries again, at the other gateway; on NOT_FOUND it creates the context again. TLS is
needed for the corrupted bytes: without it nothing on a TCP connection tells a changed byte from a right one. Disk and
/dev/shm that fill up are the suite's own, where the kernel allows a mount namespace.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from bench.chaos import private
from bench.chaos.asking import GIVE_UP_S, Asker, Tally, undisturbed
from bench.chaos.faults import NEED_PRIVATE, WEIGHTS, faults_of
from bench.chaos.world import World, running
from bench.world import held_out, write_mp4


def main() -> int:
    """Runs the suite and prints one JSON object; returns 0 when nothing was wrong, hung, leaked or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=300, help="at least so many")
    parser.add_argument("--faults", type=int, default=40, help="at least so many")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    private.enter()
    with tempfile.TemporaryDirectory(prefix="foveate-chaos-") as folder, running(Path(folder)) as world:
        result = run(world, options)
        logs = {path.name: path.read_text(errors="replace") for path in Path(folder).glob("*.log")}
    result["leaked"] += len(world.segments())
    result["tracebacks"] = {name: text.count("Traceback") for name, text in logs.items() if "Traceback" in text}
    print(json.dumps(result))
    return int(any(result[key] for key in ("wrong", "hung", "leaked", "leases_lost_by_clocks", "failed", "tracebacks")))


def run(world: World, options: argparse.Namespace) -> dict[str, object]:
    """Runs clients and faults side by side and returns the counts."""
    chance = random.Random(options.seed)
    videos = {f"video {index}": _video(world.folder, index) for index in range(2)}
    expected = undisturbed(world, videos)
    memory = world.rss_mib()
    tally, stop = Tally(), threading.Event()
    askers = [Asker(world, videos, expected, seed) for seed in range(options.clients)]
    threads = [threading.Thread(target=asker.run, args=(tally, stop)) for asker in askers]
    for thread in threads:
        thread.start()
    try:
        injected = _inject(world, options, chance, tally)
    finally:
        stop.set()
        for thread in threads:
            thread.join(GIVE_UP_S + 60)
    return {
        "answers": tally.answers,
        "faults": injected.total(),
        "wrong": tally.wrong,
        "hung": tally.hung + sum(thread.is_alive() for thread in threads),
        "leaked": world.num_open_sequences(),
        "leases_lost_by_clocks": world.num_leases_lost,
        "failed": tally.failed,
        "retried": dict(tally.retried),
        "injected": dict(injected),
        "not_possible_here": [] if world.is_private else list(NEED_PRIVATE),
        "draft_modes": dict(tally.modes),
        "rss_mib_before": memory,
        "rss_mib_after": world.rss_mib(),
    }


def _inject(world: World, options: argparse.Namespace, chance: random.Random, tally: Tally) -> Counter[str]:
    """Does harm until there were enough faults and answers: everything once, then by weight."""
    injected: Counter[str] = Counter()
    faults = faults_of(world, chance)
    order = list(faults)
    chance.shuffle(order)
    while injected.total() < options.faults or tally.answers < options.answers:
        if injected.total() < options.faults:
            name = order.pop() if order else chance.choices(list(faults), [WEIGHTS.get(one, 1) for one in faults])[0]
            sys.stderr.write(f"{tally.answers} answers, {injected.total()} faults: {name}\n")
            faults[name]()
            injected[name] += 1
        time.sleep(chance.uniform(0.2, 2.0))
    return injected


def _video(folder: Path, index: int) -> bytes:
    path = folder / f"{index}.mp4"
    write_mp4(held_out("describe", index, num_frame_pairs=6).world, path, fps=4.0)
    return path.read_bytes()


if __name__ == "__main__":
    raise SystemExit(main())
