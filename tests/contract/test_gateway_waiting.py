"""While every verifier is away, calls wait until their deadline, in a bounded queue, and are told when to try again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from foveate.rpc.admission import AdmissionLimits
from foveate.rpc.errors import Unavailable, from_rpc_error
from foveate.v1 import contexts_pb2
from gateway.config import GatewayConfig
from gateway.waiting import VerifierQueue, patience_s
from tests.fakes import (
    FakeDrafter,
    FakeVerifier,
    Stack,
    ToyModel,
    ask,
    is_ready,
    running_stack,
    serving_gateway,
    serving_verifier,
    until,
)

TEXT = "The red square moves left."
MODEL = ToyModel.of(TEXT)


@dataclass(frozen=True)
class Away:
    """A gateway whose verifier has gone, and where that verifier would come back."""

    stack: Stack
    address: str

    @property
    def num_waiting(self) -> int:
        return self.stack.backends.verifiers.queue.num_waiting

    def back(self) -> contextlib.AbstractAsyncContextManager[Any]:
        return serving_verifier(self.stack.verifier, self.address)


@contextlib.asynccontextmanager
async def away(**settings: Any) -> AsyncIterator[Away]:
    verifier = FakeVerifier(MODEL)
    async with serving_verifier(verifier) as server:
        address = f"127.0.0.1:{server.port}"
        config = GatewayConfig(verifier=address, health_interval_s=0.02, **settings)
        async with serving_gateway(verifier, FakeDrafter(MODEL), config) as stack:
            await until(lambda: is_ready(stack.backends))
            await server.stop(0)
            await until(lambda: not is_ready(stack.backends))
            yield Away(stack, address)


async def refusal(asking: Any) -> Unavailable:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asking
    error = from_rpc_error(caught.value)
    assert isinstance(error, Unavailable), error
    assert error.retry_after_s
    return error


async def create(stack: Stack) -> str:
    async def send() -> AsyncIterator[contexts_pb2.CreateContextRequest]:
        yield contexts_pb2.CreateContextRequest(spec=contexts_pb2.ContextSpec(path="clips/a.mp4"))

    return [event async for event in stack.contexts.CreateContext(send(), timeout=30)][-1].context.name


async def test_calls_wait_for_a_verifier_and_then_go_on() -> None:
    async with away() as gone:
        asking = [asyncio.create_task(ask(gone.stack, timeout_s=30)) for _ in range(3)]
        creating = asyncio.create_task(create(gone.stack))
        await until(lambda: gone.num_waiting == 4)
        async with gone.back():
            assert [(await one).text for one in asking] == [TEXT] * 3
            assert await creating
        assert gone.num_waiting == 0


async def test_nobody_waits_longer_than_the_caller_does() -> None:
    async with away() as gone:
        error = await refusal(ask(gone.stack, timeout_s=0.5))
        assert error.reason == "NO_VERIFIER"
        assert gone.num_waiting == 0


async def test_a_call_without_a_deadline_waits_for_the_limit() -> None:
    async with away(verifier_wait_s=0.1) as gone:
        assert "within 0.1 s" in (await refusal(ask(gone.stack))).message


async def test_the_queue_is_bounded_and_forgets_who_left() -> None:
    async with away(admission=AdmissionLimits(max_waiting=2)) as gone:
        waiting = [asyncio.create_task(ask(gone.stack, timeout_s=30)) for _ in range(2)]
        await until(lambda: gone.num_waiting == 2)
        assert "2 calls wait" in (await refusal(ask(gone.stack, timeout_s=30))).message
        waiting[0].cancel()
        await until(lambda: gone.num_waiting == 1)
        async with gone.back():
            assert (await waiting[1]).text == TEXT


async def test_a_verifier_that_breaks_off_at_once_is_tried_again() -> None:
    verifier = FakeVerifier(MODEL)
    verifier.die_in_open = True
    async with running_stack(verifier, FakeDrafter(MODEL)) as stack:
        assert (await refusal(ask(stack, timeout_s=30))).reason == "VERIFIER_LOST"
        assert len(verifier.opens) == 3
        asking = asyncio.create_task(ask(stack, timeout_s=30))
        await until(lambda: len(verifier.opens) == 4)
        verifier.die_in_open = False
        assert (await asking).text == TEXT


@pytest.mark.parametrize(("remaining_s", "expected_s"), [(None, 30.0), (10.0, 9.8), (0.1, 0.09), (0.0, 0.0)])
def test_patience_ends_before_the_deadline(remaining_s: float | None, expected_s: float) -> None:
    assert patience_s(remaining_s, 30.0) == pytest.approx(expected_s)


async def test_waiting_again_after_the_verifier_left_again() -> None:
    queue = VerifierQueue(max_waiting=1, limit_s=0.01)
    queue.set_ready(True)
    await queue.wait(None)
    queue.set_ready(False)
    with pytest.raises(Unavailable):
        await queue.wait(None)
