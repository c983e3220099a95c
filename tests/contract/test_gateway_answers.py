"""Answers through the real gateway and real streams, over toy services: the same tokens however they are drafted.

Cases S1 (ends), S2 (stop strings), S3 (characters), S6 (seeds), S9 (limits).
"""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from foveate.v1 import answers_pb2, sampling_pb2
from tests.fakes import (
    CONTEXT,
    PROMPT_TEXT,
    FakeDrafter,
    FakeVerifier,
    Stack,
    ToyModel,
    ask,
    encode,
    running_stack,
    toy_tokenizer,
)

TEXT = "The red square moves left. The blue circle moves right. 🙂🚀 naïve 北京の猫 The red square moves left again."
MODEL = ToyModel.of(TEXT)
OFF = answers_pb2.Drafting(mode=answers_pb2.DRAFT_MODE_OFF)
NGRAM = answers_pb2.Drafting(mode=answers_pb2.DRAFT_MODE_NGRAM)
SPARSE = answers_pb2.Drafting(mode=answers_pb2.DRAFT_MODE_SPARSE)


def check_sums(finished: answers_pb2.AnswerFinished, *, is_cut: bool = False) -> None:
    """Asserts that an answer's statistics add up; `is_cut` when it may have ended inside a draft."""
    stats = finished.stats
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens <= stats.num_draft_tokens
    assert list(stats.num_accepted_tokens_per_pos) == sorted(stats.num_accepted_tokens_per_pos, reverse=True)
    assert stats.num_draft_rounds <= stats.num_rounds == len(stats.round_overhead_ms)
    num_committed = finished.num_output_tokens + (finished.finish_reason == answers_pb2.FINISH_REASON_EOS)
    num_expected = 1 + stats.num_accepted_tokens + stats.num_rounds
    assert num_committed in ({num_expected, num_expected - 1} if is_cut else {num_expected})
    assert stats.overhead_ms == pytest.approx(stats.decode_ms - stats.draft_ms - stats.verify_ms)
    assert stats.time_to_first_token_ms > 0
    assert stats.num_loose_tokens == 0
    assert finished.guarantee == answers_pb2.GUARANTEE_LOSSLESS


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 5, 16])
async def test_drafts_never_change_the_answer(agreement: float, num_draft_tokens: int) -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=agreement)) as stack:
        answer = await ask(stack, drafting=answers_pb2.Drafting(num_draft_tokens=num_draft_tokens))
    assert answer.text == TEXT
    assert answer.token_ids == MODEL.answer(1000)
    assert answer.finished.finish_reason == answers_pb2.FINISH_REASON_EOS
    assert answer.finished.stats.draft_mode == answers_pb2.DRAFT_MODE_SPARSE
    assert not answer.finished.notes
    check_sums(answer.finished, is_cut=True)
    acceptance = answer.finished.stats.num_accepted_tokens / answer.finished.stats.num_draft_tokens
    if agreement in (0.0, 1.0):
        assert acceptance >= 0.8 * agreement
        assert acceptance <= agreement
    else:
        assert 0 < acceptance < 1


@pytest.mark.parametrize("agreement", [0.0, 0.5, 1.0])
async def test_a_length_that_adapts_never_changes_the_answer(agreement: float) -> None:
    drafter = FakeDrafter(MODEL, agreement=agreement)
    if agreement == 0.0:
        drafter.model_us = 100_000  # beside which what a busy machine adds to some round is nothing
    async with running_stack(FakeVerifier(MODEL), drafter, adapts_draft_length=True) as stack:
        answer = await ask(stack)
    assert answer.token_ids == MODEL.answer(1000)
    stats = answer.finished.stats
    # The drafter checks that rounds follow each other: it is asked again after rounds without it.
    assert (stats.draft_mode, list(answer.finished.notes)) == (answers_pb2.DRAFT_MODE_SPARSE, [])
    by_length = dict(enumerate(stats.num_rounds_per_draft_length))
    assert sum(by_length.values()) == stats.num_rounds
    assert sum(length * number for length, number in by_length.items()) == stats.num_draft_tokens
    assert drafter.streams.num_rounds == stats.num_draft_rounds
    if agreement == 0.0:
        assert by_length[0] > stats.num_rounds / 2
    if agreement == 1.0:
        assert max(by_length) > 5


async def test_off_makes_no_draft_call() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    async with running_stack(verifier, drafter) as stack:
        answer = await ask(stack, drafting=OFF)
    assert answer.text == TEXT
    assert drafter.streams.num_opened == 0
    assert not verifier.opens[0].HasField("visual_budget")
    stats = answer.finished.stats
    assert (stats.draft_mode, stats.num_draft_rounds, stats.num_draft_tokens) == (answers_pb2.DRAFT_MODE_OFF, 0, 0)
    assert stats.num_rounds == len(MODEL.answer(1000))
    check_sums(answer.finished)


async def test_ngram_drafts_need_no_drafter() -> None:
    drafter = FakeDrafter(MODEL)
    async with running_stack(FakeVerifier(MODEL), drafter) as stack:
        answer = await ask(stack, drafting=NGRAM)
    assert answer.text == TEXT
    assert drafter.streams.num_opened == 0
    assert answer.finished.stats.num_accepted_tokens > 0
    assert answer.finished.stats.draft_mode == answers_pb2.DRAFT_MODE_NGRAM
    assert not answer.finished.notes
    check_sums(answer.finished, is_cut=True)


@pytest.mark.parametrize(("drafting", "num_notes"), [(None, 0), (SPARSE, 1)])
async def test_without_a_drafter(drafting: answers_pb2.Drafting | None, num_notes: int) -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL), with_drafter=False) as stack:
        answer = await ask(stack, drafting=drafting)
        info = await stack.answers.GetServerInfo(answers_pb2.GetServerInfoRequest())
    assert answer.text == TEXT
    assert answer.finished.stats.draft_mode == answers_pb2.DRAFT_MODE_NGRAM
    assert len(answer.finished.notes) == num_notes
    assert (info.drafter_ready, info.kv_transport) == (False, "none")


async def test_the_selection_is_asked_for_and_handed_to_the_drafter() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    async with running_stack(verifier, drafter) as stack:
        await ask(
            stack,
            max_tokens=50,
            drafting=answers_pb2.Drafting(visual_budget=0.25, selection=answers_pb2.SELECTION_METHOD_RANDOM),
            sampling=sampling_pb2.SamplingParams(temperature=0.5, top_k=3, top_p=0.5, seed=9),
        )
    assert verifier.opens[0].visual_budget == 0.25
    assert verifier.opens[0].selection == answers_pb2.SELECTION_METHOD_RANDOM
    opened = drafter.opens[0]
    assert (opened.sequence_id, opened.max_tokens, opened.position_delta) == ("s1", 50, -3)
    assert (opened.selection.num_selected, opened.num_context_tokens, len(opened.visual_spans)) == (4, 20, 1)
    assert opened.kv_handle.shm.path == "/dev/shm/none"
    assert opened.sampling == verifier.opens[0].sampling
    assert (opened.sampling.seed, opened.sampling.top_k) == (9, 3)


async def test_explain_tells_origin_and_text_of_every_token() -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=0.7)) as stack:
        answer = await ask(stack, explain=True)
        plain = await ask(stack)
    origins = [origin for delta in answer.deltas for origin in delta.origins]
    assert len(origins) == len(answer.token_ids)
    for delta in answer.deltas:
        assert "".join(delta.token_texts) == delta.text
        assert len(delta.token_texts) == len(delta.token_ids)
    counts = {origin: origins.count(origin) for origin in set(origins)}
    stats = answer.finished.stats
    assert counts[answers_pb2.TOKEN_ORIGIN_PLAIN] == 1
    assert counts[answers_pb2.TOKEN_ORIGIN_ACCEPTED] in (stats.num_accepted_tokens, stats.num_accepted_tokens - 1)
    assert counts[answers_pb2.TOKEN_ORIGIN_RECOVERED] > 0
    assert not any(delta.origins or delta.token_texts for delta in plain.deltas)


async def test_no_delta_has_half_a_character() -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=0.5)) as stack:
        for length in range(1, 6):
            answer = await ask(stack, drafting=answers_pb2.Drafting(num_draft_tokens=length))
            assert not any("\ufffd" in delta.text for delta in answer.deltas)
            assert answer.text == TEXT


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7, 20])
async def test_length_is_exact(max_tokens: int) -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL)) as stack:
        answer = await ask(stack, max_tokens=max_tokens)
    assert answer.token_ids == MODEL.answer(max_tokens)
    assert answer.finished.finish_reason == answers_pb2.FINISH_REASON_LENGTH
    assert answer.finished.num_output_tokens == max_tokens
    check_sums(answer.finished)


@pytest.mark.parametrize("room", [0, 1, 3])
async def test_prompt_almost_at_the_limit(room: int) -> None:
    verifier = FakeVerifier(MODEL)
    verifier.room = room
    async with running_stack(verifier, FakeDrafter(MODEL)) as stack:
        answer = await ask(stack, max_tokens=100)
    assert answer.token_ids == MODEL.answer(max(1, room))
    assert answer.finished.finish_reason == answers_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("num_left", [1, 3])
async def test_the_limit_on_conversations_ends_an_answer_though_its_slab_has_rows_left(num_left: int) -> None:
    verifier = FakeVerifier(MODEL)
    verifier.max_thread_tokens = len(encode(PROMPT_TEXT)) + num_left
    verifier.room = 64
    async with running_stack(verifier, FakeDrafter(MODEL)) as stack:
        answer = await ask(stack)
    assert answer.token_ids == MODEL.answer(num_left)
    assert answer.finished.finish_reason == answers_pb2.FINISH_REASON_LENGTH


async def test_a_drafted_end_that_the_target_rejects_does_not_end_the_answer() -> None:
    short = ToyModel.of(toy_tokenizer().decode(list(MODEL.script[:9])))
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(short)) as stack:
        answer = await ask(stack)
    assert answer.text == TEXT
    assert answer.finished.finish_reason == answers_pb2.FINISH_REASON_EOS


@pytest.mark.parametrize("drafting", [OFF, SPARSE])
async def test_stop_strings(drafting: answers_pb2.Drafting) -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL)) as stack:
        answer = await ask(stack, stop=["circle moves right", "never said"], drafting=drafting)
        missed = await ask(stack, stop=["circle moves up"], drafting=drafting)
    assert answer.text == TEXT[: TEXT.index("circle moves right")]
    assert answer.finished.finish_reason == answers_pb2.FINISH_REASON_STOP
    assert answer.finished.num_output_tokens == len(answer.token_ids)
    assert missed.text == TEXT


async def test_seeds() -> None:
    verifier = FakeVerifier(MODEL)
    async with running_stack(verifier, FakeDrafter(MODEL)) as stack:
        warm = sampling_pb2.SamplingParams(temperature=0.8)
        drawn = [(await ask(stack, sampling=warm)).finished.seed for _ in range(2)]
        given = (await ask(stack, sampling=sampling_pb2.SamplingParams(temperature=0.8, seed=42))).finished
        greedy = (await ask(stack)).finished
    assert drawn[0] != drawn[1]
    assert [one.sampling.seed for one in verifier.opens[:2]] == drawn
    assert given.seed == 42
    assert not greedy.HasField("seed")


async def test_counts_of_the_prompt() -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL)) as stack:
        history = [
            answers_pb2.Turn(role=answers_pb2.ROLE_USER, text="One?"),
            answers_pb2.Turn(role=answers_pb2.ROLE_ASSISTANT, text="Two."),
        ]
        answer = await ask(stack, history=history)
        assert [turn.text for turn in stack.verifier.opens[0].history] == ["One?", "Two."]
    num_prompt_tokens = 20 + len(encode(PROMPT_TEXT))
    assert (answer.started.num_prompt_tokens, answer.started.num_cached_tokens) == (num_prompt_tokens, 20)
    assert answer.finished.num_prompt_tokens == num_prompt_tokens
    assert answer.finished.stats.prefill_ms == 1.5


async def fails(stack: Stack, **fields: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stack, **fields)
    return caught.value


async def test_bad_requests_leave_with_details_and_the_next_one_is_served() -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL)) as stack:
        error = await fails(stack, question="", max_tokens=-1, sampling=sampling_pb2.SamplingParams(temperature=-1))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(error)
        details = {detail.type_url.rpartition(".")[2]: detail for detail in status.details}
        bad = error_details_pb2.BadRequest()
        details["BadRequest"].Unpack(bad)
        fields = [violation.field for violation in bad.field_violations]
        assert fields == ["question", "max_tokens", "sampling.temperature"]
        assert "ErrorInfo" in details

        unknown = await fails(stack, context="contexts/" + "0" * 64)
        assert unknown.code() == grpc.StatusCode.NOT_FOUND

        stack.verifier.room = -1
        assert (await fails(stack)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        stack.verifier.room = None
        assert (await ask(stack)).text == TEXT
        assert stack.verifier.streams.num_open == 0


async def test_server_info() -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL), default_max_tokens=77) as stack:
        info = await stack.answers.GetServerInfo(answers_pb2.GetServerInfoRequest())
    assert (info.model, info.kv_transport, info.drafter_ready, info.deterministic) == ("toy", "shm", True, True)
    assert (info.pool_bytes, info.pool_used_bytes) == (1 << 20, 123)
    assert (info.limits.default_max_tokens, info.limits.default_num_draft_tokens, info.limits.max_frames) == (
        77,
        5,
        100,
    )


async def test_answers_beside_each_other() -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=0.6)) as stack:
        answers = await asyncio.gather(
            *(ask(stack, question=f"Question {index}?", context=CONTEXT) for index in range(8))
        )
        assert {answer.text for answer in answers} == {TEXT}
        assert stack.verifier.streams.num_open == stack.drafter.streams.num_open == 0
