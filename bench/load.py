"""What happens under load: throughput and latency of concurrent answers, and of an answer beside somebody's prefill.

    python -m bench.load [--visual-tokens 4096] [--concurrency 1,2,4,8,16] [--draft sparse,off]

The same questions are answered one at a time and then 2, 4, 8, 16 at a time, all about one video and spread over eight;
so every answer has a text that it must equal. Then one answer after the other runs while a video of 16k visual tokens
is uploaded, encoded and prefilled: how much longer is the time between two of its rounds? Gateway, drafter, verifier
and this client share the machine; the CPU time of each is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.long_videos import FPS, num_frame_pairs, stack_config
from bench.report import print_json, print_table, say
from bench.world import held_out, write_mp4
from bench.world.questions import ask_caption, ask_describe
from foveate.checkpoints import default_checkpoint
from foveate.client import Answer, AsyncClient, Context, DraftMode
from foveate.stack import Stack

NUM_VIDEOS = 8
QUESTIONS_PER_VIDEO = 4


@dataclass(frozen=True)
class Job:
    """A question about a video."""

    context: Context
    question: str


@dataclass
class Level:
    """What some number of answers at a time did."""

    concurrency: int
    wall_s: float = 0.0
    first_token_ms: list[float] = field(default_factory=list)
    per_token_ms: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.num_output_tokens for answer in self.answers) / self.wall_s

    @property
    def num_rounds(self) -> int:
        return sum(answer.stats.num_rounds for answer in self.answers)


def main() -> None:
    arguments = _parse_arguments()
    config = stack_config(arguments.model)
    with tempfile.TemporaryDirectory(prefix="foveate-bench-") as folder, Stack(config) as stack:
        asyncio.run(_run(stack, Path(folder), arguments))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visual-tokens", type=int, default=4096)
    parser.add_argument("--gap-visual-tokens", type=int, default=16384, help="of the video that is prefilled meanwhile")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--draft", default="sparse,off", help="draft modes, the first is the one of the JSON's ratios")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2, help="how often each question is asked at each level")
    parser.add_argument("--model", type=Path, default=default_checkpoint())
    return parser.parse_args()


async def _run(stack: Stack, folder: Path, arguments: argparse.Namespace) -> None:
    levels = [int(part) for part in arguments.concurrency.split(",")]
    drafts = [DraftMode(part.strip()) for part in arguments.draft.split(",")]
    async with AsyncClient(stack.addresses.gateway, timeout_s=3600) as client:
        before_s = time.monotonic()
        contexts = [await _context(client, folder, index, arguments.visual_tokens) for index in range(NUM_VIDEOS)]
        say(
            f"{NUM_VIDEOS} videos of {contexts[0].num_visual_tokens} visual tokens: {time.monotonic() - before_s:.0f} s"
        )
        plans = {"shared": _jobs(contexts[:1]) * arguments.repeats, "distinct": _jobs(contexts) * arguments.repeats}
        measured: dict[str, list[Level]] = {}
        for draft in drafts:
            for kind, jobs in plans.items():
                name = f"{kind}, {draft}"
                measured[name] = [await _level(client, stack, jobs, level, draft, arguments) for level in levels]
                _print_levels(name, measured[name])
        gap = await _gap(client, folder, contexts[0], arguments)
    wrong = sum(_num_wrong(one) for one in measured.values())
    ratios = {name: _ratios(one) for name, one in measured.items()}
    headline = [ratios[f"{kind}, {drafts[0]}"] for kind in plans]
    print_json(
        {
            "throughput_vs_single": {level: min(one[level] for one in headline) for level in headline[0]},
            "wrong": wrong,
            "decode_gap_ratio_p95": gap["ratio_p95"],
            "by_kind": ratios,
            "gap": gap,
        }
    )


async def _context(client: AsyncClient, folder: Path, index: int, num_visual_tokens: int) -> Context:
    sample = held_out("describe", index, num_frame_pairs=num_frame_pairs(num_visual_tokens), brief=True)
    path = folder / f"{index}-{num_visual_tokens}.mp4"
    await asyncio.to_thread(write_mp4, sample.world, path, fps=FPS)
    return await client.create_context(path, fps=FPS)


def _jobs(contexts: Sequence[Context]) -> list[Job]:
    """As many questions whatever the number of videos; neighbours are about different videos if there are several."""
    jobs = []
    for number in range(NUM_VIDEOS * QUESTIONS_PER_VIDEO):
        chance = random.Random(number)
        world = held_out("describe", number % len(contexts), num_frame_pairs=64, brief=True).world
        ask = ask_caption if number % 4 == 0 else ask_describe
        jobs.append(Job(contexts[number % len(contexts)], ask(chance, world).question))
    return jobs


async def _level(
    client: AsyncClient,
    stack: Stack,
    jobs: Sequence[Job],
    concurrency: int,
    draft: DraftMode,
    arguments: argparse.Namespace,
) -> Level:
    level = Level(concurrency)
    waiting = list(enumerate(jobs))[::-1]
    answers: dict[int, Answer] = {}

    async def work() -> None:
        while waiting:
            index, job = waiting.pop()
            begin_s, first_s = time.perf_counter(), 0.0
            async with client.stream(job.context, job.question, max_tokens=arguments.max_tokens, draft=draft) as stream:
                async for _ in stream:
                    first_s = first_s or time.perf_counter()
                answers[index] = stream.result
            level.first_token_ms.append((first_s - begin_s) * 1e3)
            if answers[index].num_output_tokens > 1:
                after_first_s = time.perf_counter() - first_s
                level.per_token_ms.append(after_first_s * 1e3 / (answers[index].num_output_tokens - 1))

    processes = {process.name: psutil.Process(process.pid) for process in stack.processes} | {
        "client": psutil.Process()
    }
    cpu_before = {name: _cpu_s(process) for name, process in processes.items()}
    begin_s = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    level.wall_s = time.perf_counter() - begin_s
    level.cpu_s = {name: _cpu_s(process) - cpu_before[name] for name, process in processes.items()}
    level.answers = [answers[index] for index in range(len(jobs))]
    return level


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def _gap(client: AsyncClient, folder: Path, context: Context, arguments: argparse.Namespace) -> dict[str, float]:
    """Times between two rounds of one answer after the other, alone and while a long video becomes a context."""
    sample = held_out("describe", NUM_VIDEOS, num_frame_pairs=num_frame_pairs(arguments.gap_visual_tokens), brief=True)
    path = folder / "long.mp4"
    await asyncio.to_thread(write_mp4, sample.world, path, fps=FPS)
    undisturbed, disturbed = list[float](), list[float]()
    end_s = time.monotonic() + 8.0
    while time.monotonic() < end_s:
        undisturbed += await _rounds_ms(client, context, arguments)
    before_s = time.monotonic()
    creating = asyncio.create_task(client.create_context(path, fps=FPS))
    while not creating.done():
        disturbed += await _rounds_ms(client, context, arguments)
    made = await creating
    p95 = [_quantile(values, 0.95) for values in (undisturbed, disturbed)]
    values = {
        "num_visual_tokens": made.num_visual_tokens,
        "created_in_s": round(time.monotonic() - before_s, 1),
        "undisturbed_ms": round(statistics.median(undisturbed), 2),
        "undisturbed_p95_ms": round(p95[0], 2),
        "disturbed_ms": round(statistics.median(disturbed), 2),
        "disturbed_p95_ms": round(p95[1], 2),
        "disturbed_max_ms": round(max(disturbed), 2),
        "ratio_p95": round(p95[1] / statistics.median(undisturbed), 2),
    }
    say(f"between two rounds of an answer, alone and beside a prefill: {values}")
    return values


async def _rounds_ms(client: AsyncClient, context: Context, arguments: argparse.Namespace) -> list[float]:
    """Answers a question; returns the times between its deltas, which are its rounds."""
    times = list[float]()
    question = ask_caption(random.Random(0), held_out("describe", 0, num_frame_pairs=64, brief=True).world).question
    async with client.stream(context, question, max_tokens=arguments.max_tokens) as stream:
        async for _ in stream:
            times.append(time.perf_counter())
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))]


def _num_wrong(levels: Sequence[Level]) -> int:
    """Answers that differ from those given one at a time."""
    alone = [answer.token_ids for answer in levels[0].answers]
    pairs = (pair for level in levels[1:] for pair in zip(alone, level.answers, strict=True))
    return sum(token_ids != answer.token_ids for token_ids, answer in pairs)


def _ratios(levels: Sequence[Level]) -> dict[str, float]:
    return {str(one.concurrency): round(one.tokens_per_s / levels[0].tokens_per_s, 2) for one in levels[1:]}


def _print_levels(name: str, levels: Sequence[Level]) -> None:
    rows = []
    for level in levels:
        cpu = " ".join(f"{process[0]} {spent * 1e3 / level.num_rounds:.2f}" for process, spent in level.cpu_s.items())
        rows.append(
            (
                level.concurrency,
                f"{level.tokens_per_s:.0f}",
                f"{level.tokens_per_s / levels[0].tokens_per_s:.2f}",
                f"{statistics.median(level.first_token_ms):.0f} / {_quantile(level.first_token_ms, 0.95):.0f}",
                f"{statistics.median(level.per_token_ms):.1f} / {_quantile(level.per_token_ms, 0.95):.1f}",
                cpu,
            )
        )
    columns = (
        "at a time",
        "tokens/s",
        "vs 1",
        "first token ms p50 / p95",
        "ms per token p50 / p95",
        "CPU ms per round",
    )
    print_table(f"{name}; CPU of gateway, drafter, verifier, client", columns, rows)
    say(f"texts that differ from those one at a time: {_num_wrong(levels)}")


if __name__ == "__main__":
    main()
