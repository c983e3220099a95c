"""Is the drafted answer the answer of plain decoding?

    python -m bench.lossless [--prompts 201] [--max-tokens 96]

For each held-out prompt (captions, object descriptions and questions; every other one sampled at T=0.8 with a seed)
three answers are compared, token id by token id: drafted and streamed through the three services from a real video
file; plain, through the same services with drafting off; and transformers' own `generate` in this process, given
explicit positions.

The services run in deterministic mode, so drafted and plain must be equal, always. transformers uses other kernels:
there a difference counts as a near tie if the reference's two best tokens were closer than 1e-4 where they part.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.reference import Reference, TransformersReference
from bench.report import print_json, print_table, say
from bench.world import Sample, held_out, write_mp4
from engine.sampling import Sampling
from foveate.checkpoints import default_checkpoint
from foveate.client import Answer, Client, Context, DraftMode, Guarantee
from foveate.stack import Stack, StackConfig

FPS = 4.0
NEAR_TIE_MARGIN = 1e-4
KINDS = ("caption", "describe", "question")
FRAME_PAIRS = (8, 16, 24, 48)
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Outcome:
    """What the three answers to one prompt say about each other."""

    kind: str  # "equal", "diverged_near_tie" or "diverged"
    label: str
    drafted: Answer
    detail: str = ""


def main() -> None:
    arguments = _parse_arguments()
    torch.set_num_threads(1)
    reference = TransformersReference(arguments.model)
    started_s = time.monotonic()
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="foveate-bench-") as folder,
        Stack(StackConfig(model=arguments.model, deterministic=True)) as stack,
        Client(stack.addresses.gateway) as client,
    ):
        for index, sample in enumerate(_prompts(arguments.prompts)):
            sampling = Sampling(TEMPERATURE, seed=index) if index % 2 else Sampling()
            outcomes.append(_compare(client, reference, sample, sampling, Path(folder), arguments.max_tokens))
            if (index + 1) % 20 == 0:
                counts = dict(Counter(outcome.kind for outcome in outcomes))
                say(f"{index + 1}/{arguments.prompts} prompts, {time.monotonic() - started_s:.0f} s: {counts}")
    _print_result(outcomes)
    raise SystemExit(1 if any(outcome.kind == "diverged" for outcome in outcomes) else 0)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=201)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--model", type=Path, default=default_checkpoint())
    return parser.parse_args()


def _prompts(num_prompts: int) -> Iterator[Sample]:
    for index in range(num_prompts):
        kind = KINDS[index % len(KINDS)]
        yield held_out(kind, index, num_frame_pairs=FRAME_PAIRS[index // len(KINDS) % len(FRAME_PAIRS)])


def _compare(
    client: Client,
    reference: TransformersReference,
    sample: Sample,
    sampling: Sampling,
    folder: Path,
    max_tokens: int,
) -> Outcome:
    video = folder / "video.mp4"
    write_mp4(sample.world, video, fps=FPS)
    context = client.create_context(video, fps=FPS)
    drafted = _ask(client, context, sample, sampling, max_tokens, DraftMode.SPARSE)
    plain = _ask(client, context, sample, sampling, max_tokens, DraftMode.OFF)
    client.delete_context(context)
    prompt = reference.prompt(video, sample.question, fps=FPS)
    expected = reference.generate(prompt, max_tokens=max_tokens, sampling=sampling)
    return _judge(sample, sampling, drafted, plain, expected)


def _ask(
    client: Client, context: Context, sample: Sample, sampling: Sampling, max_tokens: int, draft: DraftMode
) -> Answer:
    answer = client.ask(
        context,
        sample.question,
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        draft=draft,
    )
    if answer.stats.draft_mode != draft or answer.guarantee != Guarantee.LOSSLESS:
        raise RuntimeError(f"asked for {draft}, got {answer.stats.draft_mode}, {answer.guarantee}: {answer.notes}")
    return answer


def _judge(sample: Sample, sampling: Sampling, drafted: Answer, plain: Answer, expected: Reference) -> Outcome:
    label = f"{sample.kind}, {'greedy' if sampling.temperature == 0 else 'sampled'}"
    if drafted.token_ids != plain.token_ids:
        place = _first_difference(list(drafted.token_ids), list(plain.token_ids))
        return Outcome("diverged", label, drafted, f"seed {sample.seed}: drafted and plain part at token {place}")
    place = _first_difference(list(plain.token_ids), expected.token_ids)
    if place is None:
        return Outcome("equal", label, drafted)
    margin = expected.margins[place]
    kind = "diverged_near_tie" if margin < NEAR_TIE_MARGIN else "diverged"
    return Outcome(kind, label, drafted, f"seed {sample.seed}: generate parts at token {place}, margin {margin:.2g}")


def _first_difference(left: list[int], right: list[int]) -> int | None:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def _print_result(outcomes: list[Outcome]) -> None:
    labels = sorted({outcome.label for outcome in outcomes})
    rows = []
    for label in labels:
        group = [outcome for outcome in outcomes if outcome.label == label]
        counts = Counter(outcome.kind for outcome in group)
        stats = [outcome.drafted.stats for outcome in group]
        num_tokens = sum(len(outcome.drafted.token_ids) for outcome in group)
        rows.append(
            (
                label,
                len(group),
                counts["equal"],
                counts["diverged_near_tie"],
                counts["diverged"],
                num_tokens,
                sum(one.num_accepted_tokens for one in stats) / max(1, sum(one.num_draft_rounds for one in stats)),
            )
        )
    columns = ("prompts", "number", "equal", "near tie", "diverged", "tokens", "T (accepted/round)")
    print_table("drafted = plain = transformers' generate", columns, rows)
    for outcome in outcomes:
        if outcome.detail:
            say(outcome.detail)
    counts = Counter(outcome.kind for outcome in outcomes)
    num_drafted = sum(outcome.drafted.stats.num_draft_tokens for outcome in outcomes)
    num_accepted = sum(outcome.drafted.stats.num_accepted_tokens for outcome in outcomes)
    print_json(
        {
            "prompts": len(outcomes),
            "equal": counts["equal"],
            "diverged_near_tie": counts["diverged_near_tie"],
            "diverged": counts["diverged"],
            "tokens": sum(len(outcome.drafted.token_ids) for outcome in outcomes),
            "acceptance": round(num_accepted / max(1, num_drafted), 4),
        }
    )


if __name__ == "__main__":
    main()
