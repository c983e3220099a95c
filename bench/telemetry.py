"""What recording costs: the decode time of one question without telemetry, in a trace that is sampled out, recorded.

Two stacks of the same code take turns: one without telemetry, one that exports to a receiver in this process. A round
asks every kind a few times, in random order, and takes the fastest of each: what else the machine does can only add.
The ratio of a round is paired; told is the mean over rounds with its 95 % interval (bootstrap). Stacks are started anew
in between, so that where a process happens to lie in memory is not taken for a cost. JSON; returns 1 over a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from bench.otlp import Receiver, receiving
from bench.world import held_out, write_mp4
from foveate.checkpoints import default_checkpoint
from foveate.client import Client
from foveate.stack import Stack, StackConfig

NONE, SAMPLED_OUT, RECORDED = "no telemetry", "sampled out", "recorded"
LIMITS = {SAMPLED_OUT: 1.01, RECORDED: 1.05}
_WARM_UP = 10

Ask = Callable[[], float]


def main() -> int:
    """Measures, prints, and returns 1 when a cost is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", type=int, default=4, help="times that both stacks are started")
    parser.add_argument("--rounds", type=int, default=25, help="with each pair of stacks")
    parser.add_argument("--answers", type=int, default=5, help="of each kind in a round")
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    with receiving() as receiver, tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "clip.mp4"
        write_mp4(held_out("describe", 0, num_frame_pairs=12).world, video, fps=4.0)
        for _ in range(options.stacks):
            rounds += _with_stacks(receiver, video, options.rounds, options.answers)
            sys.stderr.write(f"{len(rounds)} rounds\n")
        num_spans = len(receiver.spans)
    costs = {kind: _cost([one[kind] / one[NONE] for one in rounds], limit) for kind, limit in LIMITS.items()}
    decode_ms = {kind: round(statistics.median(one[kind] for one in rounds), 3) for kind in (NONE, *LIMITS)}
    told = {"decode_ms": decode_ms, "ratio": costs, "rounds": len(rounds), "spans": num_spans}
    print(json.dumps(told))
    return int(any(cost["mean"] > cost["limit"] for cost in costs.values()))


def _with_stacks(receiver: Receiver, video: Path, num_rounds: int, num_answers: int) -> list[dict[str, float]]:
    """Returns the fastest decode time of every kind, round by round, of one pair of stacks."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(Stack(_config()))
        with mock.patch.dict(os.environ, receiver.environment(OTEL_TRACES_SAMPLER="parentbased_always_off")):
            traced = stack.enter_context(Stack(_config()))
        clients = [stack.enter_context(Client(one.addresses.gateway)) for one in (plain, traced)]
        without, exporting = (_asking(client, video) for client in clients)
        kinds: dict[str, Ask] = {
            NONE: without,
            SAMPLED_OUT: lambda: _in_trace(exporting, is_sampled=False),
            RECORDED: lambda: _in_trace(exporting, is_sampled=True),
        }
        for ask in kinds.values():
            for _ in range(_WARM_UP):
                ask()
        return [_round(kinds, num_answers) for _ in range(num_rounds)]


def _round(kinds: Mapping[str, Ask], num_answers: int) -> dict[str, float]:
    order = list(kinds) * num_answers
    random.shuffle(order)
    fastest: dict[str, float] = {}
    for kind in order:
        fastest[kind] = min(kinds[kind](), fastest.get(kind, float("inf")))
    return fastest


def _config() -> StackConfig:
    return StackConfig(default_checkpoint(), pool_mib=64)


def _asking(client: Client, video: Path) -> Ask:
    context = client.create_context(video, fps=4.0)
    # A fixed draft length: one that follows the clock would make every answer another amount of work.
    return lambda: client.ask(context, "Describe the video.", num_draft_tokens=5).stats.decode_ms


def _in_trace(ask: Ask, *, is_sampled: bool) -> float:
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else 0)
    context = SpanContext(secrets.randbits(128), secrets.randbits(64), is_remote=False, trace_flags=flags)
    with trace.use_span(NonRecordingSpan(context)):
        return ask()


def _cost(ratios: list[float], limit: float) -> dict[str, float]:
    chance = random.Random(0)
    means = sorted(statistics.mean(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "mean": round(statistics.mean(ratios), 4),
        "low": round(means[50], 4),
        "high": round(means[1949], 4),
        "limit": limit,
    }


if __name__ == "__main__":
    raise SystemExit(main())
