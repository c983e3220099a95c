"""Drafters that fail in every way (case S10): the same tokens, a note, and acceptance that shows it was noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from foveate.rpc.errors import FailedPrecondition, Unavailable
from foveate.v1 import answers_pb2, drafter_pb2
from gateway.config import GatewayConfig
from tests.fakes import (
    Answer,
    FakeDrafter,
    FakeVerifier,
    Fault,
    ToyModel,
    ask,
    running_stack,
    serving_drafter,
    serving_gateway,
    serving_verifier,
    until,
)

TEXT = "The red square moves left, the blue circle turns, and a green triangle stands still. 🙂 北京の猫が好きです。"
MODEL = ToyModel.of(TEXT)
Request = drafter_pb2.DraftRequest
Reply = drafter_pb2.DraftResponse


async def dies(request: Request, reply: Reply) -> AsyncIterator[Reply]:
    raise Unavailable("the drafter dies")
    yield reply


async def disagrees(request: Request, reply: Reply) -> AsyncIterator[Reply]:
    raise FailedPrecondition("not the round", reason="BASE_LEN_MISMATCH")
    yield reply


async def crashes(request: Request, reply: Reply) -> AsyncIterator[Reply]:
    raise RuntimeError("secret")
    yield reply


async def hangs(request: Request, reply: Reply) -> AsyncIterator[Reply]:
    await asyncio.Event().wait()
    yield reply


async def comes_too_late(request: Request, reply: Reply) -> AsyncIterator[Reply]:
    await asyncio.sleep(0.4)
    yield reply


async def is_stale(request: Request, reply: Reply) -> AsyncIterator[Reply]:
    reply.drafted.round -= 1
    reply.drafted.base_len -= 1
    yield reply


async def skips(request: Request, reply: Reply) -> AsyncIterator[Reply]:
    reply.request_id += 1
    yield reply


async def says_too_much(request: Request, reply: Reply) -> AsyncIterator[Reply]:
    reply.drafted.draft_token_ids.extend([5] * 9)
    yield reply


async def invents_tokens(request: Request, reply: Reply) -> AsyncIterator[Reply]:
    reply.drafted.draft_token_ids[0] = 2**31
    yield reply


FATAL = [dies, disagrees, crashes, hangs, comes_too_late, is_stale, skips, says_too_much, invents_tokens]


async def answer_with(fault: Fault, *, from_round: int = 3, agreement: float = 1.0) -> Answer:
    drafter = FakeDrafter(MODEL, agreement=agreement)
    drafter.fault, drafter.fault_from_round = fault, from_round
    async with running_stack(FakeVerifier(MODEL), drafter, draft_timeout_s=0.1) as stack:
        await _warm(drafter, stack)
        answer = await ask(stack)
        await until(lambda: drafter.streams.num_open == 0, within_s=1)
    return answer


async def _warm(drafter: FakeDrafter, stack: object) -> None:
    """One good answer, after which the gateway knows how long drafts usually take."""
    fault, drafter.fault = drafter.fault, None
    await ask(stack)
    drafter.fault = fault


@pytest.mark.parametrize("fault", FATAL)
async def test_a_fault_costs_speed_and_leaves_a_note(fault: Fault) -> None:
    answer = await answer_with(fault)
    assert answer.text == TEXT
    assert answer.token_ids == MODEL.answer(1000)
    assert answer.finished.stats.draft_mode == answers_pb2.DRAFT_MODE_NGRAM
    assert answer.finished.guarantee == answers_pb2.GUARANTEE_LOSSLESS
    [note] = answer.finished.notes
    assert "drafter was lost" in note
    assert "round 3" in note
    assert "secret" not in note
    # The two good rounds were accepted whole: the fault cost nothing before it came.
    assert min(answer.finished.stats.num_accepted_tokens_per_pos[:5]) >= 2


async def test_a_late_reply_is_never_taken_for_the_next_draft() -> None:
    """Every reply is preceded by one to the request before: acceptance is that of a drafter without a fault."""
    before: list[Reply] = []

    async def is_preceded_by_an_old_one(request: Request, reply: Reply) -> AsyncIterator[Reply]:
        if before:
            old = Reply()
            old.CopyFrom(before[-1])
            yield old
        before.append(reply)
        yield reply

    answer = await answer_with(is_preceded_by_an_old_one, from_round=1)
    stats = answer.finished.stats
    assert answer.text == TEXT
    assert not answer.finished.notes
    assert stats.draft_mode == answers_pb2.DRAFT_MODE_SPARSE
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.8


async def test_an_old_draft_under_the_round_number_of_the_new_one() -> None:
    """The fault of a protocol that matches replies by round: only the request id gives the late reply away."""
    before: list[Reply] = []

    async def repeats_an_old_draft(request: Request, reply: Reply) -> AsyncIterator[Reply]:
        if before:
            late = Reply()
            late.CopyFrom(reply)
            late.request_id = before[-1].request_id
            late.drafted.draft_token_ids[:] = before[-1].drafted.draft_token_ids
            yield late
        before.append(reply)
        yield reply

    answer = await answer_with(repeats_an_old_draft, from_round=1)
    stats = answer.finished.stats
    assert answer.text == TEXT
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.8


async def test_doubled_replies_are_dropped() -> None:
    async def says_all_twice(request: Request, reply: Reply) -> AsyncIterator[Reply]:
        yield reply
        yield reply

    answer = await answer_with(says_all_twice, from_round=1)
    stats = answer.finished.stats
    assert answer.text == TEXT
    assert not answer.finished.notes
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.8


async def test_a_hanging_drafter_costs_one_timeout() -> None:
    answer = await answer_with(hangs)
    assert answer.finished.stats.decode_ms < 2000
    [note] = answer.finished.notes
    assert "100 ms" in note


@pytest.mark.parametrize("error", [FailedPrecondition("other host", reason="KV_NOT_SHARED"), Unavailable("full")])
async def test_a_drafter_that_does_not_attach(error: Exception) -> None:
    drafter = FakeDrafter(MODEL)
    drafter.open_error = error
    async with running_stack(FakeVerifier(MODEL), drafter) as stack:
        answer = await ask(stack)
    assert answer.text == TEXT
    assert answer.finished.stats.draft_mode == answers_pb2.DRAFT_MODE_NGRAM
    [note] = answer.finished.notes
    assert "did not attach" in note


async def test_a_drafter_that_hangs_while_attaching() -> None:
    drafter = FakeDrafter(MODEL)
    drafter.hang_open = True
    async with running_stack(FakeVerifier(MODEL), drafter, attach_timeout_s=0.1) as stack:
        answer = await ask(stack)
    assert answer.text == TEXT
    assert "did not attach within 0.1 s" in answer.finished.notes[0]
    assert drafter.streams.num_open == 0


async def test_a_drafter_of_another_model_is_refused() -> None:
    drafter = FakeDrafter(MODEL)
    drafter.model_fingerprint = "e" * 32
    async with (
        serving_verifier(FakeVerifier(MODEL)) as verifier_server,
        serving_drafter(drafter) as drafter_server,
        serving_gateway(
            FakeVerifier(MODEL),
            drafter,
            GatewayConfig(
                verifier=f"127.0.0.1:{verifier_server.port}",
                drafter=f"127.0.0.1:{drafter_server.port}",
                health_interval_s=0.02,
            ),
        ) as stack,
    ):
        await asyncio.sleep(0.3)
        assert (await ask(stack)).text == TEXT
        assert not stack.backends.drafters.is_ready
    assert drafter.streams.num_opened == 0


async def test_a_fault_is_of_one_answer_only() -> None:
    drafter = FakeDrafter(MODEL)
    drafter.fault, drafter.fault_from_round = dies, 2
    async with running_stack(FakeVerifier(MODEL), drafter) as stack:
        assert (await ask(stack)).finished.notes
        drafter.fault = None
        after = await ask(stack)
    assert not after.finished.notes
    assert after.finished.stats.draft_mode == answers_pb2.DRAFT_MODE_SPARSE


async def test_a_drafter_comes_and_goes() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    async with running_stack(verifier, drafter) as stack:
        drafters = stack.backends.drafters
        assert (await ask(stack)).finished.stats.draft_mode == answers_pb2.DRAFT_MODE_SPARSE
        drafters.peers[0].is_ready = False
        gone = await ask(stack)
        assert "no drafter is reachable" in gone.finished.notes[0]
        assert gone.text == TEXT
        await until(lambda: drafters.is_ready)
        assert not (await ask(stack)).finished.notes


async def test_a_lost_verifier_is_unavailable_and_says_when_to_retry() -> None:
    verifier = FakeVerifier(MODEL)
    verifier.die_in_round = 2
    async with running_stack(verifier, FakeDrafter(MODEL)) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stack)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        status = rpc_status.from_call(caught.value)
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToMilliseconds() > 0
        await until(lambda: stack.drafter.streams.num_open == 0, within_s=0.5)
        verifier.die_in_round = 0
        assert (await ask(stack)).text == TEXT


async def test_the_deadline_of_the_caller_reaches_both_services() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    verifier.hang_in_round = 2
    async with running_stack(verifier, drafter) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stack, timeout_s=0.4)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: verifier.streams.num_open == drafter.streams.num_open == 0, within_s=0.5)
