"""Services that are killed or stopped in the middle of an answer, as processes (case S10)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from foveate.v1 import answers_pb2
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
    serving_gateway,
    until,
)

ROOT = Path(__file__).resolve().parents[2]
TEXT = "The red square moves left and the blue circle turns, then the green triangle stands still. 🙂 " * 2
MODEL = ToyModel.of(TEXT)


@contextlib.asynccontextmanager
async def service(
    role: str, *, port: int = 0, delay_s: float = 0.0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "tests/contract/toy_service.py"),
        role,
        str(port),
        str(delay_s),
        TEXT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process, int((await process.stdout.readline()).split()[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def gateway(verifier_port: int, drafter_port: int) -> AsyncIterator[Stack]:
    config = GatewayConfig(
        verifier=f"127.0.0.1:{verifier_port}",
        drafter=f"127.0.0.1:{drafter_port}",
        health_interval_s=0.05,
        health_timeout_s=0.5,
    )
    async with serving_gateway(FakeVerifier(MODEL), FakeDrafter(MODEL), config) as stack:
        await until(lambda: is_ready(stack.backends) and stack.backends.drafters.is_ready, within_s=10)
        yield stack


async def ask_and_signal(stack: Stack, process: asyncio.subprocess.Process, number: signal.Signals) -> str:
    """Asks, sends the signal after the third message, and returns the text."""
    call = stack.answers.Ask(answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT))
    text = ""
    for index in range(1000):
        event = await call.read()
        if index == 3:
            process.send_signal(number)
        if event.HasField("finished"):
            assert event.finished.stats.draft_mode == answers_pb2.DRAFT_MODE_NGRAM
            assert len(event.finished.notes) == 1
            return text
        text += event.delta.text
    raise AssertionError("the answer never ended")


async def read_to_the_end(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_drafter_that_is_lost_changes_no_token(number: signal.Signals) -> None:
    async with (
        service("verifier", delay_s=0.02) as (_, verifier_port),
        service("drafter") as (drafter, drafter_port),
        gateway(verifier_port, drafter_port) as stack,
    ):
        await ask(stack)
        start_s = time.perf_counter()
        assert await ask_and_signal(stack, drafter, number) == TEXT
        assert time.perf_counter() - start_s < 8
        await until(lambda: not stack.backends.drafters.is_ready)
        start_s = time.perf_counter()
        assert (await ask(stack)).text == TEXT
        assert time.perf_counter() - start_s < 5
        if number is signal.SIGSTOP:
            drafter.send_signal(signal.SIGCONT)
            await until(lambda: stack.backends.drafters.is_ready)
        else:
            async with service("drafter", port=drafter_port):
                await until(lambda: stack.backends.drafters.is_ready)
                assert not (await ask(stack)).finished.notes


async def test_a_verifier_that_is_killed_is_unavailable_at_once() -> None:
    async with (
        service("verifier", delay_s=0.02) as (verifier, verifier_port),
        service("drafter") as (_, drafter_port),
        gateway(verifier_port, drafter_port) as stack,
    ):
        call = stack.answers.Ask(answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT))
        for _ in range(3):
            await call.read()
        verifier.kill()
        start_s = time.perf_counter()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert time.perf_counter() - start_s < 1
        await until(lambda: not is_ready(stack.backends))
        async with service("verifier", port=verifier_port):
            await until(lambda: is_ready(stack.backends), within_s=10)
            assert (await ask(stack)).text == TEXT
