"""What recording costs: one question without tracing, in a trace that is sampled out, recorded.

One stack answers all three, in turns: untraced calls meet no tracing at all (bench/untraced.py), the others have a
caller whose trace is sampled out or recorded. A turn is a few answers of one kind; the first is not counted, since the
spans of the turn before it are being made then. Spans go to a receiver in a process of its own, soon after they are
made, so that a recorded turn pays for its own. A round has one turn of each kind in random order, and gives ratios to
the untraced turn: of the decode time, and of the CPU time of all three services (whole answers, exports included),
which other work on the machine blurs less. Told are medians over rounds with their 95 % intervals (bootstrap). JSON;
returns 1 when a decode time is over its limit.
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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from bench import untraced
from bench.otlp import Receiver, receiving
from bench.world import held_out, write_mp4
from foveate.checkpoints import default_checkpoint
from foveate.client import Client
from foveate.service_process import ServiceProcess
from foveate.stack import Stack, StackConfig

KINDS = NONE, SAMPLED_OUT, RECORDED = "untraced", "sampled out", "recorded"
LIMITS = {SAMPLED_OUT: 1.01, RECORDED: 1.05}
_WARM_UP = 20

Ask = Callable[[], float]


def main() -> int:
    """Measures, prints, and returns 1 when a cost is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", type=int, default=3, help="times that the stack is started")
    parser.add_argument("--seconds", type=float, default=55.0, help="of measuring with each")
    parser.add_argument("--answers", type=int, default=2, help="counted answers of a turn")
    options = parser.parse_args()
    rounds: list[dict[str, Turn]] = []
    with receiving() as receiver, tempfile.TemporaryDirectory() as folder:
        video = Path(folder) / "clip.mp4"
        write_mp4(held_out("describe", 0, num_frame_pairs=12).world, video, fps=4.0)
        for _ in range(options.stacks):
            rounds += _with_a_stack(receiver, video, options.seconds, options.answers)
            sys.stderr.write(f"{len(rounds)} rounds\n")
        num_spans = len(receiver.spans())
    told = {
        "decode_ms": {kind: round(statistics.median(one[kind].decode_ms for one in rounds), 2) for kind in KINDS},
        "decode_ratio": {kind: _cost([one[kind].decode_ms / one[NONE].decode_ms for one in rounds]) for kind in LIMITS},
        "cpu_ratio": {kind: _cost([one[kind].cpu_s / one[NONE].cpu_s for one in rounds]) for kind in LIMITS},
        "limits": LIMITS,
        "rounds": len(rounds),
        "spans": num_spans,
    }
    print(json.dumps(told))
    return int(any(told["decode_ratio"][kind]["median"] > limit for kind, limit in LIMITS.items()))


@dataclass(frozen=True)
class Turn:
    """A few answers of one kind: mean decode time, and what CPU time the services took for them."""

    decode_ms: float
    cpu_s: float


class _SwitchedStack(Stack):
    """A stack whose services can be asked without tracing."""

    def _spawn(self, name: str, module: str, arguments: Sequence[str]) -> ServiceProcess:
        return super()._spawn(name, untraced.__name__, [module, *arguments])


def _with_a_stack(receiver: Receiver, video: Path, seconds: float, num_answers: int) -> list[dict[str, Turn]]:
    """Returns every kind's turn, round by round."""
    # Metrics are sent once a minute by default and are no part of a trace's cost.
    environment = receiver.environment(OTEL_TRACES_SAMPLER="parentbased_always_off", OTEL_METRICS_EXPORTER="none")
    with contextlib.ExitStack() as stack:
        with mock.patch.dict(os.environ, environment):
            running = stack.enter_context(_SwitchedStack(StackConfig(default_checkpoint(), pool_mib=64, pin=True)))
        address = running.addresses.gateway
        asks = [
            _asking(stack.enter_context(Client(address, **options)), video)
            for options in ({"api_key": untraced.KEY}, {})
        ]
        kinds: dict[str, Ask] = {
            NONE: asks[0],
            SAMPLED_OUT: lambda: _in_trace(asks[1], is_sampled=False),
            RECORDED: lambda: _in_trace(asks[1], is_sampled=True),
        }
        for ask in kinds.values():
            for _ in range(_WARM_UP):
                ask()
        clocks = [_cpu_clock(process.pid) for process in running.processes]
        rounds, end_s = [], time.monotonic() + seconds
        while time.monotonic() < end_s:
            order = random.sample(list(kinds), len(kinds))
            rounds.append({kind: _turn(kinds[kind], clocks, num_answers) for kind in order})
        return rounds


def _turn(ask: Ask, clocks: Sequence[int], num_answers: int) -> Turn:
    ask()
    begin_s = sum(map(time.clock_gettime, clocks))
    decode_ms = statistics.mean(ask() for _ in range(num_answers))
    return Turn(decode_ms, sum(map(time.clock_gettime, clocks)) - begin_s)


def _cpu_clock(pid: int) -> int:
    """Returns the clock of the CPU time of another process, as clock_getcpuclockid of Linux makes it."""
    return (~pid << 3) | 2


def _asking(client: Client, video: Path) -> Ask:
    context = client.create_context(video, fps=4.0)
    # A fixed draft length: one that follows the clock would make every answer another amount of work.
    return lambda: client.ask(context, "Describe the video.", num_draft_tokens=5).stats.decode_ms


def _in_trace(ask: Ask, *, is_sampled: bool) -> float:
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else 0)
    context = SpanContext(secrets.randbits(128), secrets.randbits(64), is_remote=False, trace_flags=flags)
    with trace.use_span(NonRecordingSpan(context)):
        return ask()


def _cost(ratios: list[float]) -> dict[str, float]:
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "median": round(statistics.median(ratios), 4),
        "low": round(medians[50], 4),
        "high": round(medians[1949], 4),
    }


if __name__ == "__main__":
    raise SystemExit(main())
