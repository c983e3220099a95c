"""Sequences over gRPC: the target's tokens whatever is drafted, selections, and memory that always comes back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from engine.handle_proto import selection_from_proto
from foveate.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from foveate.v1 import answers_pb2, sampling_pb2
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Served, Stream, config_for, serving
from verifier_svc.config import MIB

CLIP = clips.clip(9, fps=4)
QUESTION = "What is that?"
GREEDY = sampling_pb2.SamplingParams()
SEEDED = sampling_pb2.SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=42)


@pytest.fixture(params=[False, True], ids=["fast", "deterministic"])
async def served(request: pytest.FixtureRequest, checkpoint: Path) -> AsyncIterator[Served]:
    async with serving(config_for(checkpoint, deterministic=request.param)) as served:
        yield served


@pytest.fixture
async def fast(checkpoint: Path) -> AsyncIterator[Served]:
    async with serving(config_for(checkpoint)) as served:
        yield served


def reference_tokens(served: Served, folder: Path, stream: Stream, num_tokens: int) -> list[int]:
    """Greedy tokens of transformers' own model and attention, without any cache, from the processor's own inputs."""
    parts = served.verifier.parts
    opened = stream.opened
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
    with av.open(io.BytesIO(CLIP)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    inputs = parts.loaded.processor.video_processor(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    (span,) = opened.visual_spans
    grid = tuple(inputs["video_grid_thw"][0].tolist())
    token_ids = parts.context_token_ids(grid, (0.0,)) + list(opened.prompt_token_ids)
    assert parts.loaded.family.num_visual_tokens(grid) == span.num_tokens
    for _ in range(num_tokens):
        positions = parts.loaded.family.positions(token_ids, [grid], [0.5]).ids
        is_visual = torch.tensor([token_ids]) == model.config.video_token_id
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([token_ids]),
                position_ids=positions.unsqueeze(1),
                mm_token_type_ids=torch.where(is_visual, 2, 0),
                **inputs,
            )
        logits = output.logits[0, -1]
        logits[list(parts.loaded.family.placeholder_token_ids)] = float("-inf")
        logits[parts.vocab_size :] = float("-inf")
        token_ids.append(int(logits.argmax()))
    return token_ids[-num_tokens:]


async def test_plain_decoding_is_transformers_own(served: Served, checkpoint: Path) -> None:
    context = await served.prefill(CLIP, fps=4)
    async with served.answering(context.name, QUESTION) as stream:
        tokens = await stream.plain(24)
        # Five steps of half a second at two positions a second; the frame's sides are shorter.
        assert stream.opened.position_delta == 5 - context.num_visual_tokens
        assert tokens == reference_tokens(served, checkpoint, stream, 24)
        assert len(set(tokens)) > 5  # an answer, not one token over and over


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_drafts_never_change_the_tokens(served: Served, sampling: sampling_pb2.SamplingParams) -> None:
    context = await served.prefill(CLIP, fps=4)
    async with served.answering(context.name, QUESTION, sampling=sampling) as stream:
        plain = await stream.plain(40)
    rng = random.Random(1)

    def often_right(token_ids: list[int]) -> list[int]:
        truth = plain[len(token_ids) : len(token_ids) + rng.randrange(0, 9)]
        return [token if rng.random() < 0.8 else rng.randrange(8, 200) for token in truth]

    def always_wrong(token_ids: list[int]) -> list[int]:
        return [(token + 1) % 200 for token in plain[len(token_ids) : len(token_ids) + 5]]

    for drafter in (often_right, always_wrong, lambda token_ids: plain[len(token_ids) : len(token_ids) + 16]):
        async with served.answering(context.name, QUESTION, sampling=sampling) as stream:
            assert await stream.drafted(40, drafter) == plain


async def test_a_later_round_may_keep_less_than_was_accepted(fast: Served) -> None:
    context = await fast.prefill(CLIP, fps=4)
    async with fast.answering(context.name, QUESTION) as stream:
        plain = await stream.plain(12)
    async with fast.answering(context.name, QUESTION) as stream:
        first, base_len = stream.opened.first_token_id, stream.opened.num_prompt_tokens
        targets = await stream.round(base_len, [first], plain[1:6])
        assert targets == plain[1:7]
        # The answer ended inside the block, or a policy chose otherwise: two drafts stay, the rest is rolled back.
        assert await stream.round(base_len + 3, [plain[3]], plain[4:8]) == plain[4:9]


async def test_repeated_and_wrong_rounds(fast: Served) -> None:
    context = await fast.prefill(CLIP, fps=4)
    held_bytes = await fast.used_bytes()
    async with fast.answering(context.name, QUESTION) as stream:
        first, base_len = stream.opened.first_token_id, stream.opened.num_prompt_tokens
        verified = await stream.repeat(1, base_len, [first], [5, 6])
        assert await stream.repeat(1, base_len, [first], [5, 6]) == verified
        with pytest.raises(FailedPrecondition) as caught:
            await stream.repeat(3, base_len + 1, [9])
        assert caught.value.reason == "BASE_LEN_MISMATCH"
        assert caught.value.metadata["expected_round"] == "2"
    for changed in ({"base_len": base_len - 1}, {"base_len": base_len + 9}):
        async with fast.answering(context.name, QUESTION) as stream:
            with pytest.raises(FailedPrecondition):
                await stream.repeat(1, token_ids=[first], **changed)
    async with fast.answering(context.name, QUESTION) as stream:
        with pytest.raises(FailedPrecondition, match="open already"):
            await stream.open(context=context.name, question="again", max_tokens=5)
    stream = Stream(fast.stub.Verify())
    with pytest.raises(FailedPrecondition, match="open the sequence first"):
        await stream.round(base_len, [1])
    await asyncio.sleep(0.05)
    assert await fast.used_bytes() == held_bytes


async def test_selections(fast: Served) -> None:
    context = await fast.prefill(CLIP, fps=4)
    num_visual = context.num_visual_tokens
    picked = {}
    for method in ("ATTENTION", "RANDOM", "RECENT"):
        selection = getattr(answers_pb2, f"SELECTION_METHOD_{method}")
        async with fast.answering(context.name, QUESTION, visual_budget=0.25, selection=selection) as stream:
            opened = stream.opened
            assert opened.selection.num_selected == round(0.25 * num_visual)
            view = fast.verifier.parts.pool.selection_view(selection_from_proto(opened.selection))
            picked[method] = view.clone()
            (span,) = opened.visual_spans
            assert int(view.min()) >= span.start
            assert int(view.max()) < span.start + span.num_tokens
            assert bool((view.diff(dim=-1) > 0).all())
    assert not torch.equal(picked["ATTENTION"], picked["RANDOM"])
    assert not torch.equal(picked["ATTENTION"], picked["RECENT"])
    for fields, expected in (
        ({"visual_budget": 0.0}, 0),
        ({"visual_budget": 0.001}, 1),
        ({"visual_budget": 1.0}, num_visual),
        ({"num_selected": 3}, 3),
        ({"num_selected": 10**9}, num_visual),
    ):
        async with fast.answering(context.name, QUESTION, **fields) as stream:
            assert stream.opened.HasField("selection")
            assert stream.opened.selection.num_selected == expected
    async with fast.answering(context.name, QUESTION) as stream:
        assert not stream.opened.HasField("selection")


async def test_the_selection_is_made_by_the_questions_words_in_any_chunking(checkpoint: Path) -> None:
    picked = []
    for step in (512, 7, 1):
        async with serving(config_for(checkpoint, prefill_chunk_tokens=step)) as served:
            context = await served.prefill(CLIP, fps=4)
            async with served.answering(context.name, "Which way does it go, and why?", visual_budget=0.2) as stream:
                picked.append(
                    served.verifier.parts.pool.selection_view(selection_from_proto(stream.opened.selection)).clone()
                )
                picked.append(torch.tensor(await stream.plain(8)))
    assert all(torch.equal(picked[index], picked[index % 2]) for index in range(6))


async def test_history_is_part_of_the_thread(fast: Served) -> None:
    context = await fast.prefill(CLIP, fps=4)
    history = [
        answers_pb2.Turn(role=answers_pb2.ROLE_USER, text="What?"),
        answers_pb2.Turn(role=answers_pb2.ROLE_ASSISTANT, text="A square."),
    ]
    async with fast.answering(context.name, "And then?", history=history) as stream:
        assert stream.opened.num_context_tokens == context.num_tokens
        assert stream.opened.num_prompt_tokens == context.num_tokens + len(stream.opened.prompt_token_ids)
        assert "A square." in fast.verifier.parts.loaded.tokenizer.decode(list(stream.opened.prompt_token_ids))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"question": ""}, "open.question"),
        ({"question": " \n "}, "open.question"),
        ({"question": "x" * 32769}, "open.question"),
        ({"max_tokens": 0}, "open.max_tokens"),
        ({"visual_budget": 1.5}, "open.visual_budget"),
        ({"visual_budget": float("nan")}, "open.visual_budget"),
        ({"sampling": sampling_pb2.SamplingParams(temperature=-1)}, "open.sampling.temperature"),
        ({"sampling": sampling_pb2.SamplingParams(temperature=11, seed=1)}, "open.sampling.temperature"),
        ({"sampling": sampling_pb2.SamplingParams(temperature=1)}, "open.sampling.seed"),
        ({"sampling": sampling_pb2.SamplingParams(top_p=0)}, "open.sampling.top_p"),
        ({"selection": 77}, "open.selection"),
        ({"history": [answers_pb2.Turn(role=answers_pb2.ROLE_USER, text="x")]}, "open.history"),
        ({"history": [answers_pb2.Turn(text="x"), answers_pb2.Turn(text="y")]}, "open.history"),
        ({"context": "contexts/nonsense"}, "open.context"),
    ],
)
async def test_bad_openings(fast: Served, fields: dict[str, object], field: str) -> None:
    asked = {"context": "contexts/" + "0" * 64, "question": "x", "max_tokens": 5} | fields
    with pytest.raises(InvalidArgument) as caught:
        await Stream(fast.stub.Verify()).open(**asked)
    assert [violation.field for violation in caught.value.violations] == [field]


async def test_an_unknown_context_is_not_found(fast: Served) -> None:
    with pytest.raises(NotFound) as caught:
        await Stream(fast.stub.Verify()).open(context="contexts/" + "0" * 64, question="x", max_tokens=5)
    assert caught.value.resource == ("context", "contexts/" + "0" * 64)


async def test_rooms(checkpoint: Path) -> None:
    async with serving(config_for(checkpoint, max_thread_tokens=60)) as served:
        context = await served.prefill(CLIP, fps=4)
        with pytest.raises(ResourceExhausted) as caught:
            await Stream(served.stub.Verify()).open(context=context.name, question="x" * 200, max_tokens=5)
        assert caught.value.reason == "THREAD_TOO_LONG"
        assert caught.value.metadata["limit_tokens"] == "60"
        # What fits is served, up to the limit, however much was asked for (case S9).
        async with served.answering(context.name, "x", max_tokens=2**32 - 1) as stream:
            room = 60 - len(stream.opened.prompt_token_ids)
            assert len(await stream.plain(room)) == room
            await stream.round(stream.opened.num_prompt_tokens + room - 1, [9], [8] * 15)
            with pytest.raises(InvalidArgument, match="the round is not valid"):
                await stream.round(stream.opened.num_prompt_tokens + room, [9], [8] * 16)


async def test_a_cancelled_answer_gives_its_memory_back_within_200_ms(fast: Served) -> None:
    context = await fast.prefill(CLIP, fps=4)
    held_bytes = await fast.used_bytes()
    async with fast.answering(context.name, QUESTION, visual_budget=0.5) as stream:
        await stream.plain(3)
        assert await fast.used_bytes() > held_bytes
        assert fast.verifier.num_sequences == 1
        stream.call.cancel()
        before = time.monotonic()
        while await fast.used_bytes() > held_bytes or fast.verifier.num_sequences:
            await asyncio.sleep(0.005)
            assert time.monotonic() - before < 0.2


async def test_200_cancelled_openings_leave_nothing(fast: Served, caplog: pytest.LogCaptureFixture) -> None:
    context = await fast.prefill(CLIP, fps=4)
    held_bytes = await fast.used_bytes()
    rng = random.Random(2)

    async def open_and_leave() -> None:
        stream = Stream(fast.stub.Verify())
        opening = asyncio.create_task(
            stream.open(context=context.name, question="x" * 50, max_tokens=30, visual_budget=0.3)
        )
        await asyncio.sleep(rng.random() * 0.02)
        stream.call.cancel()
        opening.cancel()  # grpc.aio never wakes a write whose call is cancelled before it has begun
        await asyncio.gather(opening, return_exceptions=True)

    for _ in range(20):
        await asyncio.gather(*(open_and_leave() for _ in range(10)))
    for _ in range(100):
        if fast.verifier.num_sequences == 0:
            break
        await asyncio.sleep(0.02)
    assert (await fast.used_bytes(), fast.verifier.num_sequences) == (held_bytes, 0)
    async with fast.answering(context.name, QUESTION) as stream:
        await stream.plain(3)
    await asyncio.sleep(0.05)
    assert "idle KV pool" not in caplog.text


async def test_one_answer_too_many_is_refused_and_may_come_again(checkpoint: Path) -> None:
    async with serving(config_for(checkpoint, max_sequences=1)) as served:
        context = await served.prefill(CLIP)
        async with served.answering(context.name):
            with pytest.raises(ResourceExhausted, match="the limit is 1") as refused:
                await Stream(served.stub.Verify()).open(context=context.name, question="What?", max_tokens=4)
            assert (refused.value.reason, refused.value.retry_after_s) == ("TOO_MANY_SEQUENCES", 1.0)
        while True:
            with contextlib.suppress(ResourceExhausted):  # until the first has closed
                async with served.answering(context.name) as stream:
                    assert len(await stream.plain(3)) == 3
                break
    assert served.verifier.num_sequences == 0


async def test_answers_at_once_are_batched_and_each_is_its_solo_self(checkpoint: Path) -> None:
    async with serving(config_for(checkpoint, pool_bytes=16 * MIB)) as served:
        contexts = [(await served.prefill(clips.clip(9, seed=seed))).name for seed in range(2)]
        asked = [(name, sampling) for name in contexts for sampling in (GREEDY, SEEDED)] * 2

        async def answer(name: str, sampling: sampling_pb2.SamplingParams, num_drafts: int) -> list[int]:
            async with served.answering(name, sampling=sampling) as stream:
                return await stream.drafted(20, lambda token_ids: token_ids[-num_drafts:] if num_drafts else [])

        alone = [await answer(name, sampling, 0) for name, sampling in asked]
        scheduler = served.verifier.scheduler
        before = scheduler.num_steps, scheduler.num_blocks
        together = await asyncio.gather(
            *(answer(name, sampling, index % 4) for index, (name, sampling) in enumerate(asked))
        )
        assert list(together) == alone
        num_steps, num_blocks = scheduler.num_steps - before[0], scheduler.num_blocks - before[1]
        assert num_blocks > num_steps  # steps had several answers in them
        assert scheduler.num_live == 0
