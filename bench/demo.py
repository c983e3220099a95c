"""The whole of Foveate in a minute: a local stack, a video with known facts, three questions about it.

    python -m bench.demo [--model FOLDER]

The video is drawn, so the truth is known. The first question pays for reading and prefilling the video; the others
reuse it. Each question is asked a second time with drafting off: its tokens must be the same. Exits with 1, and says
why, when they are not, when nothing was accepted, or when the video was not reused.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.world import Sample, facts, validation, write_mp4
from bench.world.questions import ask_caption, ask_describe, ask_multiple_choice
from foveate.checkpoints import default_checkpoint
from foveate.cli.answer_view import STYLES, OriginColours
from foveate.client import Answer, Client, Context, DraftMode, Guarantee, Origin
from foveate.rpc.errors import FoveateError
from foveate.stack import Stack, StackConfig

FPS = 4.0
NUM_FRAME_PAIRS = 32
WORLD_INDEX = 7
MAX_TOKENS = 160
ASKERS = (ask_caption, ask_describe, ask_multiple_choice)

console = Console(highlight=False, width=None if sys.stdout.isatty() else 112)


@dataclass(frozen=True)
class Asked:
    """One question of the demo and what came of it."""

    sample: Sample
    answer: Answer
    plain: Answer
    total_ms: float

    @property
    def is_equal_to_plain(self) -> bool:
        """Whether drafting left the tokens as plain decoding has them."""
        return self.answer.token_ids == self.plain.token_ids


def main() -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description="Foveate in a minute.")
    parser.add_argument("--model", type=Path, default=None, help="checkpoint folder; default: the embedded tiny model")
    model = parser.parse_args().model
    try:
        return run(default_checkpoint() if model is None else model)
    except FoveateError as error:
        console.print(Text(f"the demo failed: {error}", style="bold red"))
        return 1


def run(model: Path) -> int:
    """Runs the demo with the checkpoint at `model`; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="foveate-demo-") as folder:
        video = Path(folder) / "sample.mp4"
        world = validation("describe", WORLD_INDEX, num_frame_pairs=NUM_FRAME_PAIRS).world
        console.print("drawing a video with known facts", style="dim")
        write_mp4(world, video, fps=FPS)
        samples = [ask(random.Random(WORLD_INDEX), world) for ask in ASKERS]
        stack = Stack(StackConfig(model=model, deterministic=True))
        try:
            console.print("starting verifier, drafter and gateway", style="dim")
            with console.status("") as spinner:
                stack.start(lambda step: spinner.update(step))
            with Client(stack.addresses.gateway) as client:
                context, context_ms = _prefill(client, video)
                _print_setting(client, context, context_ms)
                asked = [_ask(client, context, sample, number) for number, sample in enumerate(samples, start=1)]
        finally:
            stack.stop()
    return _conclude(model, context, context_ms, asked)


def _prefill(client: Client, video: Path) -> tuple[Context, float]:
    started_s = time.perf_counter()
    context = client.create_context(video, fps=FPS)
    return context, (time.perf_counter() - started_s) * 1e3


def _print_setting(client: Client, context: Context, context_ms: float) -> None:
    info, video = client.server_info(), context.video
    console.print(
        f"[bold]{info.model}[/] on {info.device}; the drafter reads the verifier's KV over {info.kv_transport}\n"
        f"a drawn video of {video.duration_s:.0f} s, {video.num_frames} frames, {context.num_visual_tokens} visual "
        f"tokens: read and prefilled once, in {context_ms:.0f} ms\n"
    )
    legend = {
        Origin.ACCEPTED: "accepted draft",
        Origin.RECOVERED: "verifier's correction",
        Origin.BONUS: "verifier's bonus",
        Origin.PLAIN: "no draft",
    }
    listed = Text(" · ").join(Text(said, STYLES[one]) for one, said in legend.items())
    console.print(Text("tokens: ").append(listed), "\n")


def _ask(client: Client, context: Context, sample: Sample, number: int) -> Asked:
    started_s = time.perf_counter()
    answer, styled = _stream(client, context, sample.question)
    total_ms = (time.perf_counter() - started_s) * 1e3
    plain = client.ask(context, sample.question, max_tokens=MAX_TOKENS, draft=DraftMode.OFF)
    asked = Asked(sample, answer, plain, total_ms)
    console.print(Text(f"{number}. {sample.question}", style="bold"))
    console.print(Text("   answer  ").append(styled))
    console.print(Text(f"   truth   {sample.answer}", style="dim"))
    console.print(Text(f"           {facts(sample, answer.text):.0%} of the facts are right", style="dim"))
    for note in answer.notes:
        console.print(Text(f"   note    {note}", style="yellow"))
    console.print()
    return asked


def _stream(client: Client, context: Context, question: str) -> tuple[Answer, Text]:
    colours, styled = OriginColours(), Text()
    with client.stream(context, question, max_tokens=MAX_TOKENS, explain=True) as stream:
        for delta in stream:
            styled.append(colours.take(delta))
        return stream.result, styled


def _conclude(model: Path, context: Context, context_ms: float, asked: Sequence[Asked]) -> int:
    _print_table(asked, context_ms)
    problems = _problems(asked)
    for problem in problems:
        console.print(Text(f"wrong: {problem}", style="bold red"))
    if not problems:
        console.print(
            "\nWhere to go next\n"
            "  foveate up                                  serve on port 8080 until Ctrl-C\n"
            '  foveate ask video.mp4 "What happens?"       a video of yours; --explain colours the tokens\n'
            "  foveate chat video.mp4                      several turns about one prefilled video\n"
            "  gateway/rounds.py                           the algorithm, on one screen\n",
            markup=False,
        )
    print(json.dumps(_result(model, context, context_ms, asked, problems)), flush=True)
    return 1 if problems else 0


def _print_table(asked: Sequence[Asked], context_ms: float) -> None:
    table = Table(title="tokens are compared with plain decoding of the same model", title_justify="left")
    for column in (
        "question",
        "tokens",
        "rounds",
        "accepted a round",
        "guarantee",
        "as plain",
        "time",
        "of it prefill",
    ):
        table.add_column(column, justify="left" if column == "question" else "right")
    for number, one in enumerate(asked, start=1):
        first_ms = context_ms if number == 1 else 0.0
        accepted = one.answer.stats.accepted_per_round
        table.add_row(
            f"{number}, first" if number == 1 else f"{number}, video reused",
            str(one.answer.num_output_tokens),
            str(one.answer.stats.num_rounds),
            "no drafts" if accepted is None else f"{accepted:.2f}",
            one.answer.guarantee.value,
            "yes" if one.is_equal_to_plain else "NO",
            f"{first_ms + one.total_ms:.0f} ms",
            f"{first_ms + one.answer.stats.prefill_ms:.0f} ms",
        )
    console.print(table)


def _problems(asked: Sequence[Asked]) -> list[str]:
    problems = []
    if not sum(one.answer.stats.num_accepted_tokens for one in asked):
        problems.append("no draft token was accepted")
    if not any(one.answer.stats.draft_mode is DraftMode.SPARSE for one in asked):
        problems.append("the sparse drafter took no part")
    for number, one in enumerate(asked, start=1):
        if not one.is_equal_to_plain:
            problems.append(f"answer {number} differs from plain decoding")
        if one.answer.guarantee is not Guarantee.LOSSLESS:
            problems.append(f"answer {number} is not lossless")
        if not one.answer.num_cached_tokens:
            problems.append(f"question {number} did not reuse the video")
    return problems


def _result(
    model: Path, context: Context, context_ms: float, asked: Sequence[Asked], problems: Sequence[str]
) -> dict[str, object]:
    num_accepted = sum(one.answer.stats.num_accepted_tokens for one in asked)
    num_draft_rounds = sum(one.answer.stats.num_draft_rounds for one in asked)
    return {
        "model": model.name,
        "visual_tokens": context.num_visual_tokens,
        "first_question_ms": round(context_ms + asked[0].total_ms, 1),
        "repeated_question_ms": [round(one.total_ms, 1) for one in asked[1:]],
        "accepted_per_round": round(num_accepted / num_draft_rounds, 3) if num_draft_rounds else None,
        "equal_to_plain": [one.is_equal_to_plain for one in asked],
        "facts": [round(facts(one.sample, one.answer.text), 3) for one in asked],
        "guarantee": sorted({one.answer.guarantee.value for one in asked}),
        "problems": list(problems),
    }


if __name__ == "__main__":
    sys.exit(main())
