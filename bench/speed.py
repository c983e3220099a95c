"""How fast is decoding over a long video: plain, Sparse-to-Dense, and transformers' `generate`, in one run?

    python -m bench.speed [--visual-tokens 4096,16384,65536]

Plain decoding and Sparse-to-Dense (StD) run through the three services, verifier and drafter pinned to a core each,
one torch thread a service. transformers (stock scaled-dot-product attention, same weights, same prompts, one thread)
decodes in this process, from a cache that holds a copy of the verifier's prefilled keys and values, so that only
decoding is compared. All figures count the time between the first token and the last. Questions are asked in turn by
every method, and repeated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from bench.long_videos import FPS, answer_len, num_frame_pairs, questions_about, stack_config
from bench.report import CoreLoad, print_json, print_table, say
from bench.transformers_decoding import decode_with_transformers
from bench.world import Sample, held_out, validation, write_mp4
from foveate.checkpoints import default_checkpoint
from foveate.client import Answer, Client, Context, DraftMode
from foveate.stack import Stack


@dataclass
class Timing:
    """Decoding of one method at one context length, over all questions and repeats."""

    decode_ms: float = 0.0
    num_tokens: int = 0  # after the first token of each answer
    answers: list[Answer] = field(default_factory=list)

    @property
    def ms_per_token(self) -> float:
        return self.decode_ms / max(1, self.num_tokens)

    def add(self, answer: Answer) -> None:
        self.decode_ms += answer.stats.decode_ms
        self.num_tokens += answer_len(answer) - 1  # the first is there before the clock starts
        self.answers.append(answer)


@dataclass(frozen=True)
class Row:
    """All that was measured at one context length."""

    num_visual_tokens: int
    plain: Timing
    std: Timing
    transformers_ms_per_token: float
    transformers_agrees: bool
    core_load_percent: dict[str, list[float]]

    @property
    def acceptance(self) -> float:
        stats = [answer.stats for answer in self.std.answers]
        return sum(one.num_accepted_tokens for one in stats) / max(1, sum(one.num_draft_tokens for one in stats))

    @property
    def accepted_per_round(self) -> float:
        stats = [answer.stats for answer in self.std.answers]
        return sum(one.num_accepted_tokens for one in stats) / max(1, sum(one.num_draft_rounds for one in stats))

    @property
    def overhead_ms(self) -> list[float]:
        return sorted(value for answer in self.std.answers for value in answer.stats.round_overhead_ms)


def main() -> None:
    arguments = _parse_arguments()
    torch.set_num_threads(1)
    reference = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.float32).eval()
    lengths = [int(part) for part in arguments.visual_tokens.split(",")]
    config = stack_config(arguments.model, pin=True)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="foveate-bench-") as folder,
        Stack(config) as stack,
        Client(stack.addresses.gateway, timeout_s=3600) as client,
    ):
        for num_visual_tokens in lengths:
            rows.append(_measure(client, stack, reference, Path(folder), num_visual_tokens, arguments))
    _print_result(rows, arguments)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visual-tokens", default="4096,16384,65536", help="comma-separated context lengths")
    parser.add_argument("--questions", type=int, default=3, help="questions per video")
    parser.add_argument("--repeats", type=int, default=2, help="how often each method answers each question")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-draft-tokens", type=int, default=None, help="default: the server's")
    parser.add_argument("--budget", type=float, default=None, help="share of visual tokens; default: the server's")
    parser.add_argument("--split", choices=("held_out", "validation"), default="held_out")
    parser.add_argument("--model", type=Path, default=default_checkpoint())
    return parser.parse_args()


def _measure(
    client: Client,
    stack: Stack,
    reference: torch.nn.Module,
    folder: Path,
    num_visual_tokens: int,
    arguments: argparse.Namespace,
) -> Row:
    pick = held_out if arguments.split == "held_out" else validation
    sample: Sample = pick("describe", 0, num_frame_pairs=num_frame_pairs(num_visual_tokens), brief=True)
    questions = questions_about(sample, arguments.questions)
    video = folder / "video.mp4"
    started_s = time.monotonic()
    write_mp4(sample.world, video, fps=FPS)
    written_s = time.monotonic()
    context = client.create_context(video, fps=FPS)
    say(
        f"{context.num_visual_tokens} visual tokens: file written in {written_s - started_s:.0f} s, "
        f"context made in {time.monotonic() - written_s:.0f} s"
    )
    plain, std = Timing(), Timing()
    load = CoreLoad()
    loads: dict[str, list[float]] = {}
    for name, timing, draft in (("plain", plain, DraftMode.OFF), ("std", std, DraftMode.SPARSE)):
        _ask(client, context, questions[0], draft, arguments)  # warm-up
        load.percent_per_core()
        for question in questions * arguments.repeats:
            timing.add(_ask(client, context, question, draft, arguments))
        loads[name] = load.percent_per_core()
    if [answer.token_ids for answer in plain.answers] != [answer.token_ids for answer in std.answers]:
        say("note: drafted and plain answers differ where tokens are tied within rounding")
    load.percent_per_core()
    every_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(every_core)})  # the verifier's core, which is idle now
    ms_per_token, agrees = decode_with_transformers(
        stack.addresses.verifier, reference, context, questions, plain.answers, arguments.max_tokens
    )
    loads["transformers"] = load.percent_per_core()
    os.sched_setaffinity(0, every_core)
    client.delete_context(context)
    return Row(context.num_visual_tokens, plain, std, ms_per_token, agrees, loads)


def _ask(client: Client, context: Context, question: str, draft: DraftMode, arguments: argparse.Namespace) -> Answer:
    answer = client.ask(
        context,
        question,
        max_tokens=arguments.max_tokens,
        draft=draft,
        num_draft_tokens=arguments.num_draft_tokens,
        visual_budget=arguments.budget,
    )
    if answer.stats.draft_mode != draft:
        raise RuntimeError(f"asked for {draft}, got {answer.stats.draft_mode}: {answer.notes}")
    return answer


def _print_result(rows: list[Row], arguments: argparse.Namespace) -> None:
    table = []
    for row in rows:
        plain, std = row.plain.ms_per_token, row.std.ms_per_token
        table.append(
            (
                row.num_visual_tokens,
                f"{plain:.1f}",
                f"{std:.1f}",
                f"{row.transformers_ms_per_token:.1f}",
                f"{plain / std:.2f}",
                f"{row.transformers_ms_per_token / std:.2f}",
                f"{row.transformers_ms_per_token / plain:.2f}",
                f"{row.acceptance:.2f}",
                f"{row.accepted_per_round:.2f}",
                f"{statistics.median(row.overhead_ms):.1f}",
                "yes" if row.transformers_agrees else "no",
            )
        )
    columns = (
        "visual",
        "plain ms",
        "StD ms",
        "hf ms",
        "StD vs plain",
        "StD vs hf",
        "plain vs hf",
        "accepted",
        "T",
        "overhead ms",
        "same as hf",
    )
    print_table("milliseconds per token, and speed-ups (hf: transformers)", columns, table)
    for row in rows:
        loads = ", ".join(f"{name} {load}" for name, load in row.core_load_percent.items())
        say(f"{row.num_visual_tokens}: busy share of each core in percent: {loads}")
    overheads = sorted(value for row in rows for value in row.overhead_ms)
    print_json(
        {
            "ratios": {
                str(row.num_visual_tokens): {
                    "std_vs_plain": round(row.plain.ms_per_token / row.std.ms_per_token, 3),
                    "std_vs_transformers": round(row.transformers_ms_per_token / row.std.ms_per_token, 3),
                    "plain_vs_transformers": round(row.transformers_ms_per_token / row.plain.ms_per_token, 3),
                }
                for row in rows
            },
            "acceptance": {str(row.num_visual_tokens): round(row.acceptance, 3) for row in rows},
            "T": {str(row.num_visual_tokens): round(row.accepted_per_round, 3) for row in rows},
            "overhead_ms": {
                "p50": round(statistics.median(overheads), 2),
                "p95": round(overheads[int(0.95 * (len(overheads) - 1))], 2),
            },
            "core_load_percent": {str(row.num_visual_tokens): row.core_load_percent for row in rows},
            "num_draft_tokens": arguments.num_draft_tokens,
            "budget": arguments.budget,
        }
    )


if __name__ == "__main__":
    main()
