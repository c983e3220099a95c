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
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch
from transformers import AutoModelForImageTextToText, DynamicCache, LogitsProcessor

from bench.report import CoreLoad, print_json, print_table, say
from bench.world import Sample, held_out, validation, write_mp4
from bench.world.questions import ask_describe
from engine.handle_proto import handle_from_proto
from engine.kv_handle import Slab
from engine.kv_share import MappedPool
from foveate.checkpoints import default_checkpoint
from foveate.client import Answer, Client, Context, DraftMode, FinishReason
from foveate.rpc.channel import CHANNEL_OPTIONS
from foveate.stack import Stack, StackConfig
from foveate.v1 import verifier_pb2, verifier_pb2_grpc

FPS = 4.0
CELLS = 9


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
        # The end token is decoded too, though it is no output; the first token is there before the clock starts.
        ended = answer.finish_reason == FinishReason.EOS
        self.num_tokens += answer.num_output_tokens - 1 + int(ended)
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
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    reference = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=torch.float32).eval()
    lengths = [int(part) for part in arguments.visual_tokens.split(",")]
    config = StackConfig(
        model=arguments.model,
        pin=True,
        num_threads=1,
        pool_mib=1024,
        extra_verifier_arguments=("--max-visual-tokens", "140000", "--max-frames", "40000"),
    )
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
    sample: Sample = pick("describe", 0, num_frame_pairs=-(-num_visual_tokens // CELLS), brief=False)
    questions = [ask_describe(random.Random(index), sample.world).question for index in range(arguments.questions)]
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
    ms_per_token, agrees = _transformers(stack, reference, context, questions, plain, arguments.max_tokens)
    loads["transformers"] = load.percent_per_core()
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


def _transformers(
    stack: Stack,
    reference: torch.nn.Module,
    context: Context,
    questions: Sequence[str],
    plain: Timing,
    max_tokens: int,
) -> tuple[float, bool]:
    """Returns milliseconds per token of `generate` and whether its tokens are those of our plain decoding."""
    total_ms, num_tokens, agrees = 0.0, 0, True
    for index, question in enumerate(questions):
        opened, cache = _prefilled_cache(stack, context, question)
        clock = _Clock()
        token_ids = _generate(reference, opened, cache, clock, max_tokens)
        total_ms += clock.decode_ms
        num_tokens += len(clock.times_s) - 1
        ours = list(plain.answers[index].token_ids)
        agrees = agrees and token_ids[: len(ours)] == ours
    return total_ms / max(1, num_tokens), agrees


def _prefilled_cache(stack: Stack, context: Context, question: str) -> tuple[verifier_pb2.SequenceOpened, DynamicCache]:
    """Opens a sequence as a gateway would, and copies its keys and values out of the shared pool as a drafter would."""
    opening = verifier_pb2.OpenSequence(context=context.name, question=question, max_tokens=1)
    with grpc.insecure_channel(stack.addresses.verifier, options=CHANNEL_OPTIONS) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        requests = _HeldOpen(verifier_pb2.VerifyRequest(request_id=1, open=opening))
        call = stub.Verify(iter(requests))
        opened = next(call).opened
        pool = MappedPool.attach(handle_from_proto(opened.kv_handle), device=torch.device("cpu"))
        num_context, num_prompt = opened.num_context_tokens, opened.num_prompt_tokens
        cache = DynamicCache()
        context_rows = pool.views(Slab(opened.context.offset_bytes, opened.context.capacity))
        thread_rows = pool.views(Slab(opened.thread.offset_bytes, opened.thread.capacity))
        for layer in range(opened.kv_handle.num_layers):
            keys, values = (
                torch.cat([whole[layer, :, :num_context], new[layer, :, : num_prompt - num_context]], dim=1)[None]
                for whole, new in zip(context_rows, thread_rows, strict=True)
            )
            cache.update(keys, values, layer)
        requests.close()
        call.cancel()
    return opened, cache


class _HeldOpen:
    """A request stream that stays open after its one message until it is closed."""

    def __init__(self, message: verifier_pb2.VerifyRequest) -> None:
        self._message, self._closed = message, threading.Event()

    def __iter__(self):  # type: ignore[no-untyped-def]
        yield self._message
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()


class _Clock(LogitsProcessor):
    """Notes when each token's logits are there."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return scores

    @property
    def decode_ms(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) * 1000


@torch.inference_mode()
def _generate(
    model: torch.nn.Module,
    opened: verifier_pb2.SequenceOpened,
    cache: DynamicCache,
    clock: _Clock,
    max_tokens: int,
) -> list[int]:
    # Only the last id is run; those before it stand in the cache, and their ids are never looked at.
    num_prompt = opened.num_prompt_tokens
    input_ids = torch.zeros(1, num_prompt + 1, dtype=torch.int64)
    input_ids[0, -1] = opened.first_token_id
    positions = (torch.arange(num_prompt + 1) + opened.position_delta).expand(3, 1, -1)
    output = model.generate(  # type: ignore[operator]
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        mm_token_type_ids=torch.zeros_like(input_ids),
        position_ids=positions,
        cache=cache,
        max_new_tokens=max_tokens - 1,
        do_sample=False,
        logits_processor=[clock],
    )
    return [int(token_id) for token_id in output[0, num_prompt:]]


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
        "visual tokens",
        "plain ms/token",
        "StD ms/token",
        "transformers ms/token",
        "StD / plain",
        "StD / transf.",
        "plain / transf.",
        "acceptance",
        "T",
        "overhead ms/round",
        "same tokens",
    )
    print_table("decoding speed; ratios are speed-ups", columns, table)
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
