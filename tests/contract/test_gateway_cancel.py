"""Callers that go away, callers that ping, and services that stop (cases G1, G2, G6)."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foveate.rpc.channel import CHANNEL_OPTIONS, open_channel
from foveate.v1 import answers_pb2, answers_pb2_grpc
from gateway.config import GatewayConfig
from tests.fakes import (
    CONTEXT,
    PROMPT_TEXT,
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

MODEL = ToyModel.of("The red square moves left and right and left. " * 8)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def start_asking(stack: Stack, num_tokens: int) -> grpc.aio.UnaryStreamCall:
    """Asks and reads until `num_tokens` tokens have come."""
    call = stack.answers.Ask(answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT))
    seen = 0
    while seen < num_tokens:
        seen += len((await call.read()).delta.token_ids)
    return call


@pytest.mark.parametrize("where", ["between rounds", "while verifying", "while drafting"])
async def test_a_cancelled_answer_ends_both_streams(where: str) -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=0.3)
    verifier.delay_s = 0.01
    if where == "while verifying":
        verifier.hang_in_round = 4
    if where == "while drafting":

        async def hangs(request: object, reply: object) -> object:
            await asyncio.Event().wait()
            yield reply

        drafter.fault, drafter.fault_from_round = hangs, 4
    async with running_stack(verifier, drafter, draft_timeout_s=30) as stack:
        call = await start_asking(stack, 3)
        if where != "between rounds":
            await until(lambda: max(verifier.streams.num_rounds, drafter.streams.num_rounds - 1) >= 3)
        call.cancel()
        took_s = await until(lambda: verifier.streams.num_open == drafter.streams.num_open == 0)
        assert took_s < 0.2
        rounds = verifier.streams.num_rounds
        await asyncio.sleep(0.1)
        assert verifier.streams.num_rounds == rounds
        verifier.hang_in_round, drafter.fault = 0, None
        assert (await ask(stack)).finished.num_output_tokens == len(MODEL.answer(256))


async def test_cancelling_many_answers_leaves_nothing_open() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    async with running_stack(verifier, drafter) as stack:
        for num_tokens in (0, 1, 2, 7) * 5:
            (await start_asking(stack, num_tokens)).cancel()
        await until(lambda: verifier.streams.num_open == drafter.streams.num_open == 0, within_s=1)
        assert verifier.streams.num_opened <= 20


async def test_when_an_answer_ends_its_sequences_are_gone() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    async with running_stack(verifier, drafter) as stack:
        await ask(stack)
        assert verifier.streams.num_open == drafter.streams.num_open == 0


async def test_a_client_that_pings_survives_a_silent_handler() -> None:
    verifier = FakeVerifier(MODEL)
    async with running_stack(verifier, FakeDrafter(MODEL)) as stack:
        options = (
            *CHANNEL_OPTIONS,
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.server.port}", options=options) as channel:
            verifier.delay_s = 3.5
            stub = answers_pb2_grpc.AnswerServiceStub(channel)
            request = answers_pb2.AskRequest(
                context=CONTEXT,
                question=PROMPT_TEXT,
                max_tokens=2,
                drafting=answers_pb2.Drafting(mode=answers_pb2.DRAFT_MODE_OFF),
            )
            events = [event async for event in stub.Ask(request)]
    assert events[-1].finished.num_output_tokens == 2


async def test_health_follows_the_verifier() -> None:
    verifier = FakeVerifier(MODEL)
    async with serving_verifier(verifier) as first:
        port = first.port
        config = GatewayConfig(verifier=f"127.0.0.1:{port}", health_interval_s=0.05)
        async with serving_gateway(verifier, FakeDrafter(MODEL), config) as stack:
            await until(lambda: is_ready(stack.backends))
            async with open_channel(f"127.0.0.1:{stack.server.port}") as channel:
                health = health_pb2_grpc.HealthStub(channel)

                async def becomes(status: int) -> None:
                    async with asyncio.timeout(5):
                        for name in ("", "foveate.v1.AnswerService", "foveate.v1.ContextService"):
                            request = health_pb2.HealthCheckRequest(service=name)
                            while (await health.Check(request)).status != status:  # noqa: ASYNC110 - health is asked
                                await asyncio.sleep(0.02)

                await becomes(SERVING)
                await first.stop(0)
                await becomes(NOT_SERVING)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(stack, timeout_s=0.5)
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
                async with serving_verifier(verifier, f"127.0.0.1:{port}"):
                    await becomes(SERVING)
                    await ask(stack)


async def test_a_verifier_of_another_minor_version_is_not_used() -> None:
    verifier = FakeVerifier(MODEL)
    verifier.version = "99.0.0"
    async with serving_verifier(verifier) as server:
        config = GatewayConfig(verifier=f"127.0.0.1:{server.port}", health_interval_s=0.02)
        async with serving_gateway(verifier, FakeDrafter(MODEL), config) as stack:
            await asyncio.sleep(0.2)
            assert not is_ready(stack.backends)


async def test_health_answers_while_the_verifier_works() -> None:
    verifier = FakeVerifier(MODEL)
    async with running_stack(verifier, FakeDrafter(MODEL)) as stack:
        verifier.hang_in_round = 1
        call = await start_asking(stack, 1)
        async with open_channel(f"127.0.0.1:{stack.server.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            start_s = time.perf_counter()
            reply = await health.Check(health_pb2.HealthCheckRequest())
            assert time.perf_counter() - start_s < 0.2
            assert reply.status == SERVING
        call.cancel()
