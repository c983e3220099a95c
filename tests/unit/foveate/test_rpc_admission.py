"""Admission: places, shares, rates, and refusing at once what cannot be done in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate.rpc.admission import Admission, AdmissionLimits
from foveate.rpc.errors import InvalidArgument, NotFound, ResourceExhausted, Unauthenticated, from_rpc_error
from foveate.rpc.security import digest_of, new_key
from foveate.v1 import answers_pb2
from tests.fakes import CONTEXT, PROMPT_TEXT, FakeDrafter, FakeVerifier, Stack, ToyModel, ask, running_stack, until

MODEL = ToyModel.of("The red square moves left. " * 4)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def hold(admission: Admission, tenant: str = "", remaining_s: float | None = None) -> contextlib.AsyncExitStack:
    stack = contextlib.AsyncExitStack()
    await stack.enter_async_context(admission.admitted(tenant, remaining_s))
    return stack


async def refusal(admission: Admission, tenant: str = "", remaining_s: float | None = None) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as caught:
        async with asyncio.timeout(1):
            await hold(admission, tenant, remaining_s)
    assert caught.value.retry_after_s
    assert set(caught.value.metadata) == {"needed", "limit"}
    return caught.value


async def test_places_are_given_in_order_and_the_queue_is_bounded() -> None:
    admission = Admission(AdmissionLimits(max_running=1, max_waiting=2))
    first = await hold(admission)
    order: list[int] = []

    async def wait(number: int) -> None:
        async with admission.admitted("", None):
            order.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(2)]
    await until(lambda: admission.num_waiting == 2)
    assert (await refusal(admission)).reason == "QUEUE_FULL"
    await first.aclose()
    await asyncio.gather(*waiting)
    assert order == [0, 1]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_tenant_at_its_share_does_not_hold_up_others() -> None:
    admission = Admission(AdmissionLimits(max_running=2, max_running_per_tenant=1))
    greedy = await hold(admission, "greedy")
    queued = asyncio.create_task(hold(admission, "greedy"))
    await until(lambda: admission.num_waiting == 1)
    modest = await hold(admission, "modest")
    assert not queued.done()
    await modest.aclose()
    await asyncio.sleep(0)
    assert not queued.done()
    await greedy.aclose()
    await (await queued).aclose()


async def test_a_wait_that_would_outlast_the_deadline_is_refused_at_once() -> None:
    clock = Clock()
    admission = Admission(AdmissionLimits(max_running=1), clock_s=clock)
    first = await hold(admission)
    clock.now_s = 10.0
    await first.aclose()
    second = await hold(admission)
    error = await refusal(admission, remaining_s=3.0)
    assert error.reason == "DEADLINE_TOO_SHORT"
    assert float(error.metadata["needed"]) == pytest.approx(10)
    patient = asyncio.create_task(hold(admission, remaining_s=60.0))
    await until(lambda: admission.num_waiting == 1)
    await second.aclose()
    await (await patient).aclose()


async def test_a_rate_is_held_per_tenant_and_says_when_to_come_back() -> None:
    clock = Clock()
    admission = Admission(AdmissionLimits(max_per_second_per_tenant=2.0), clock_s=clock)
    for _ in range(2):
        await (await hold(admission, "fast")).aclose()
    error = await refusal(admission, "fast")
    assert (error.reason, error.retry_after_s) == ("RATE_LIMITED", pytest.approx(0.5))
    await (await hold(admission, "other")).aclose()
    clock.now_s += 0.5
    await (await hold(admission, "fast")).aclose()
    assert (await refusal(admission, "fast")).reason == "RATE_LIMITED"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=40))
def test_whatever_comes_and_goes_bounds_hold_and_nothing_leaks(calls: list[tuple[str, int, bool]]) -> None:
    async def run() -> None:
        admission = Admission(AdmissionLimits(max_running=3, max_waiting=100, max_running_per_tenant=2))
        running: dict[str, int] = {}

        async def call(tenant: str, num_turns: int) -> None:
            async with admission.admitted(tenant, None):
                running[tenant] = running.get(tenant, 0) + 1
                assert running[tenant] <= 2
                assert sum(running.values()) <= 3
                try:
                    for _ in range(num_turns):
                        await asyncio.sleep(0)
                finally:
                    running[tenant] -= 1

        tasks = []
        for tenant, num_turns, is_cancelled in calls:
            tasks.append(asyncio.create_task(call(tenant, num_turns)))
            await asyncio.sleep(0)
            if is_cancelled:
                tasks[len(tasks) // 2].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in ended)
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    asyncio.run(run())


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[Stack, str]]:
    key = new_key()
    (tmp_path / "keys").write_text(f"acme {digest_of(key)}\n")
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    limits = AdmissionLimits(max_running=1, max_waiting=1)
    async with running_stack(verifier, drafter, api_keys=tmp_path / "keys", admission=limits) as stack:
        yield stack, key


async def test_every_public_method_asks_for_the_key(guarded: tuple[Stack, str]) -> None:
    stack, key = guarded
    request = answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT)
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        for call in (
            stack.answers.Ask(request, metadata=metadata).read(),
            stack.answers.GetServerInfo(answers_pb2.GetServerInfoRequest(), metadata=metadata),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = from_rpc_error(caught.value)
            assert isinstance(error, Unauthenticated)
    allowed = (("authorization", f"Bearer {key}"),)
    info = await stack.answers.GetServerInfo(answers_pb2.GetServerInfoRequest(), metadata=allowed)
    assert info.model == "toy"
    events = [event async for event in stack.answers.Ask(request, metadata=allowed)]
    assert events[-1].HasField("finished")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.answers.Ask(answers_pb2.AskRequest(), metadata=allowed).read()
    assert isinstance(from_rpc_error(caught.value), InvalidArgument)


async def test_the_gateway_queues_and_refuses_and_a_cancelled_answer_gives_its_place_back() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    verifier.hang_in_round = 2
    limits = AdmissionLimits(max_running=1, max_waiting=1)
    async with running_stack(verifier, drafter, admission=limits) as stack:
        request = answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT)
        first = stack.answers.Ask(request)
        await first.read()
        second = stack.answers.Ask(request)
        waiting = asyncio.create_task(second.read())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.answers.Ask(request).read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, ResourceExhausted)
        assert (error.reason, bool(error.retry_after_s)) == ("QUEUE_FULL", True)
        verifier.hang_in_round = 0
        first.cancel()
        assert (await waiting).HasField("started")
        second.cancel()
        assert (await ask(stack)).finished.num_output_tokens
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.answers.Ask(answers_pb2.AskRequest(context="contexts/" + "0" * 64, question="?")).read()
        assert isinstance(from_rpc_error(caught.value), NotFound)
