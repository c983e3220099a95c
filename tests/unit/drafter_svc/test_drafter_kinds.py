"""Every kind of drafts: what it reads, what it proposes, and that what it proposes is right by its own lights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import Drafter
from drafter_svc.streaming import sink_and_recent
from engine.attention import KvView
from engine.device_thread import DeviceThread
from engine.early_exit import early_exit
from engine.kv_pool import KvPool
from engine.loading import LoadedModel
from engine.positions import text_positions
from engine.runner import TextRunner
from engine.sampling import Sampling, choose
from engine.selection import SelectionMethod
from foveate.rpc.errors import FailedPrecondition, InvalidArgument
from foveate.v1 import answers_pb2, drafter_pb2
from tests.kernels import KERNEL_CACHE
from tests.unit.drafter_svc.sequence import (
    GRID,
    NUM_BEFORE,
    NUM_QUESTION,
    NUM_VISUAL,
    SECOND_PER_GRID,
    Sequence,
    make_sequence,
    plain_answer,
)
from tests.unit.drafter_svc.stream import Stream, opened_with, refused
from tests.unit.drafter_svc.test_drafter_rounds import answer

if TYPE_CHECKING:
    from foveate.v1.drafter_pb2_grpc import DrafterServiceAsyncStub as Stub

SAMPLED = Sampling(temperature=1.0, seed=9)


async def test_what_is_offered(stub: Stub, loaded: LoadedModel) -> None:
    info = await stub.GetDrafterInfo(drafter_pb2.GetDrafterInfoRequest())
    names = [answers_pb2.DraftMode.Name(kind.mode) for kind in info.kinds]
    assert names == ["DRAFT_MODE_SPARSE", "DRAFT_MODE_STREAMING", "DRAFT_MODE_LAYERSKIP", "DRAFT_MODE_SMALL"]
    assert {kind.model_fingerprint for kind in info.kinds} == {loaded.fingerprint}
    assert {kind.tokenizer_sha256 for kind in info.kinds} == {loaded.tokenizer_sha256}


@pytest.mark.parametrize("small_only", [True, False])
async def test_a_kind_without_its_model_is_refused(checkpoint: object, sequence: Sequence, small_only: bool) -> None:
    device = DeviceThread()
    paths = {"model_path": None, "small_model_path": checkpoint} if small_only else {"model_path": checkpoint}
    drafter = await Drafter.load(DrafterConfig(**paths), device)  # type: ignore[arg-type]
    from drafter_svc.messages import parse_open

    wrong = sequence.open_message() if small_only else sequence.small_message()
    with pytest.raises(FailedPrecondition) as caught:
        async with drafter.sequence(parse_open(wrong, vocab_size=drafter.vocab_size)):
            pass
    assert caught.value.reason == "KIND_NOT_OFFERED"
    await drafter.close()
    device.close()


# Streaming ---------------------------------------------------------------------------------------------------------


def test_the_first_rows_and_the_latest() -> None:
    assert sink_and_recent(100, 7) == [0, 1, 2, 3, 97, 98, 99]
    assert sink_and_recent(100, 3) == [0, 1, 2]
    assert sink_and_recent(5, 9) == [0, 1, 2, 3, 4]
    assert sink_and_recent(5, 0) == []


async def test_streaming_counts_text_into_its_window(stub: Stub, sequence: Sequence) -> None:
    for share, num_rows in ((0.0, 9), (0.25, 9 + 20), (1.0, 9 + 80)):
        message = sequence.open_message(mode=answers_pb2.DRAFT_MODE_STREAMING, visual_budget=share)
        message.ClearField("selection")
        async with opened_with(stub, message) as (_, num_read):
            assert num_read == num_rows


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
async def test_streaming_over_everything_drafts_what_plain_decoding_says(
    stub: Stub, loaded: LoadedModel, pool: KvPool, sampling: Sampling
) -> None:
    expected = plain_answer(loaded, pool, sampling, 20)
    sequence = make_sequence(loaded, pool, sampling=sampling)
    message = sequence.open_message(mode=answers_pb2.DRAFT_MODE_STREAMING, visual_budget=1.0)
    async with opened_with(stub, message) as (stream, _):
        out, drafted, accepted = await answer(stream, sequence, 20)
    assert (out, drafted) == (expected, accepted)


# LayerSkip ---------------------------------------------------------------------------------------------------------


async def test_early_exit_drafts_what_the_short_model_says(stub: Stub, loaded: LoadedModel, sequence: Sequence) -> None:
    message = sequence.open_message(mode=answers_pb2.DRAFT_MODE_LAYERSKIP)
    message.ClearField("selection")
    async with opened_with(stub, message) as (stream, num_read):
        assert num_read == sequence.num_context_tokens
        drafts = await stream.round(1, sequence.num_prompt_tokens, sequence.tokens)
    short = early_exit(loaded, 1)
    runner = TextRunner(short, kernel_cache=KERNEL_CACHE)
    keys, values = sequence.pool.views(sequence.context)
    thread = [part[:1].clone() for part in sequence.pool.views(sequence.thread)]
    fed = list(sequence.tokens)
    for index in range(5):
        hidden = runner.forward(
            token_ids=fed,
            positions=text_positions(sequence.num_prompt_tokens + sequence.delta, len(fed)),
            kv=KvView((keys[:1], values[:1]), (thread[0], thread[1]), NUM_QUESTION),
        )
        fed += choose(runner.logits(hidden[-1:]), sequence.num_prompt_tokens + 1 + index, Sampling())
    assert drafts == fed[1:]


def test_an_early_exit_shares_weights_and_leaves_the_model_whole(loaded: LoadedModel) -> None:
    short = early_exit(loaded, 1)
    whole = loaded.family.text_model(loaded.model)
    cut = loaded.family.text_model(short.model)
    assert (len(cut.layers), len(whole.layers)) == (1, 2)
    assert cut.layers[0] is whole.layers[0]
    assert loaded.family.lm_head(short.model) is loaded.family.lm_head(loaded.model)
    for number in (0, 3):
        with pytest.raises(ValueError, match="num_layers"):
            early_exit(loaded, number)


async def test_early_exit_never_changes_the_answer(stub: Stub, loaded: LoadedModel, pool: KvPool) -> None:
    expected = plain_answer(loaded, pool, Sampling(), 20)
    sequence = make_sequence(loaded, pool)
    async with opened_with(stub, sequence.open_message(mode=answers_pb2.DRAFT_MODE_LAYERSKIP)) as (stream, _):
        out, _, _ = await answer(stream, sequence, 20)
    assert out == expected


# Small -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
async def test_the_model_itself_on_the_whole_video_drafts_what_plain_decoding_says(
    stub: Stub, loaded: LoadedModel, pool: KvPool, sampling: Sampling
) -> None:
    expected = plain_answer(loaded, pool, sampling, 30)
    sequence = make_sequence(loaded, pool, sampling=sampling, method=SelectionMethod.UNIFORM)
    async with opened_with(stub, sequence.small_message()) as (stream, num_read):
        assert num_read == sequence.num_context_tokens
        out, drafted, accepted = await answer(stream, sequence, 30)
    assert out == expected
    assert drafted == accepted > 20


@pytest.mark.parametrize("num_selected", [0, 7, 40])
async def test_on_a_pruned_video_it_drafts_what_a_plain_forward_says(
    stub: Stub, loaded: LoadedModel, pool: KvPool, num_selected: int
) -> None:
    expected = plain_answer(loaded, pool, Sampling(), 24)
    sequence = make_sequence(loaded, pool, num_selected=num_selected, method=SelectionMethod.UNIFORM)
    rejected = 0
    async with opened_with(stub, sequence.small_message()) as (stream, num_read):
        assert num_read == sequence.num_context_tokens - NUM_VISUAL + num_selected
        base_len, token_ids, number = sequence.num_prompt_tokens, sequence.tokens[-1:], 0
        out = list(sequence.tokens)
        while len(out) < 24:
            number += 1
            drafts = await stream.round(number, base_len, token_ids, 4)
            assert drafts == by_plain_forwards(loaded, sequence, out, 4)
            targets = sequence.verify(base_len, token_ids, drafts)
            matches = [draft == target for draft, target in zip(drafts, targets, strict=False)]
            count = matches.index(False) if False in matches else len(drafts)
            rejected += len(drafts) - count
            out += targets[: count + 1]
            base_len, token_ids = base_len + len(token_ids) + count, [targets[count]]
    assert out[:24] == expected
    assert rejected


def by_plain_forwards(loaded: LoadedModel, sequence: Sequence, answer_ids: list[int], num: int) -> list[int]:
    """What the model chooses after `answer_ids` with the pruned video, every token computed anew."""
    runner = TextRunner(loaded, kernel_cache=KERNEL_CACHE)
    selection = sequence.pool.selection_view(sequence.selection)[0, 0].tolist()
    context = range(sequence.num_context_tokens)
    visual = range(NUM_BEFORE, NUM_BEFORE + NUM_VISUAL)
    kept = [row for row in context if row not in visual or row in selection]
    positions = loaded.family.positions(sequence.prompt, [GRID], [SECOND_PER_GRID])
    features = loaded.family.encode_video(
        loaded.model, sequence.pool.tensor_view(sequence.patches), torch.tensor([GRID])
    )
    fed = list(answer_ids)
    for _ in range(num):
        embeds = runner.embed([*sequence.prompt, *fed]).clone()
        embeds[visual.start : visual.stop] = features
        rows = [*kept, *range(sequence.num_context_tokens, len(sequence.prompt) + len(fed))]
        ids = torch.cat([positions.ids, text_positions(positions.next_position, len(fed))], dim=1)
        shape = (loaded.layout.num_layers, loaded.layout.num_kv_heads, len(rows), loaded.layout.head_dim)
        hidden = runner.forward(
            embeds=embeds[rows], positions=ids[:, rows], kv=KvView(None, (torch.zeros(shape), torch.zeros(shape)), 0)
        )
        fed += choose(runner.logits(hidden[-1:]), len(sequence.prompt) + len(fed), Sampling())
    return fed[len(answer_ids) :]


async def test_drafts_that_a_loose_policy_keeps_are_gone_on_from(stub: Stub, loaded: LoadedModel, pool: KvPool) -> None:
    sequence = make_sequence(loaded, pool, num_selected=7, method=SelectionMethod.UNIFORM)
    async with opened_with(stub, sequence.small_message()) as (stream, _):
        start = sequence.num_prompt_tokens
        first = await stream.round(1, start, sequence.tokens, 4)
        # All four are kept, whatever the verifier thinks, and token 50 follows.
        second = await stream.round(2, start + 1 + 4, [50], 4)
        assert second == by_plain_forwards(loaded, sequence, [*sequence.tokens, *first, 50], 4)
        third = await stream.round(3, start + 1 + 4 + 1 + 2, [60], 4)
        kept = [*sequence.tokens, *first, 50, *second[:2], 60]
        assert third == by_plain_forwards(loaded, sequence, kept, 4)


async def test_what_does_not_fit_is_refused_by_name(stub: Stub, loaded: LoadedModel, pool: KvPool) -> None:
    sequence = make_sequence(loaded, pool, num_selected=7, method=SelectionMethod.UNIFORM)
    random = make_sequence(loaded, pool, num_selected=7, method=SelectionMethod.RANDOM)
    error = await refused(Stream(stub.Draft()), open=sequence.small_message(patches_digest="0" * 64))
    assert isinstance(error, FailedPrecondition)
    assert error.reason == "MODEL_MISMATCH"
    error = await refused(Stream(stub.Draft()), open=random.small_message())
    assert isinstance(error, FailedPrecondition)
    assert error.reason == "KV_STALE"
    for message, field in (
        (sequence.small_message(grid_time=6), "open"),
        (sequence.small_message(second_per_grid=0.0), "open.video"),
        (_without_prompt(sequence), "open.prompt_token_ids"),
        (sequence.open_message(mode=answers_pb2.DRAFT_MODE_NGRAM), "open.mode"),
        (sequence.open_message(visual_budget=1.5), "open.visual_budget"),
    ):
        error = await refused(Stream(stub.Draft()), open=message)
        assert isinstance(error, InvalidArgument)
        assert [violation.field for violation in error.violations] == [field]


def _without_prompt(sequence: Sequence) -> drafter_pb2.OpenDraft:
    message = sequence.small_message()
    message.ClearField("prompt_token_ids")
    return message
