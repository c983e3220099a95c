"""The gateway as a process: READY, health, SIGTERM, wrong settings, and nothing heavy imported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foveate.rpc.channel import open_channel
from foveate.v1 import answers_pb2, answers_pb2_grpc
from tests.fakes import (
    CONTEXT,
    PROMPT_TEXT,
    FakeDrafter,
    FakeVerifier,
    ToyModel,
    serving_drafter,
    serving_verifier,
    until,
)

MODEL = ToyModel.of("The red square moves left.")


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway.main",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@contextlib.asynccontextmanager
async def gateway(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, grpc.aio.Channel]]:
    process = await start(*flags)
    try:
        ready = (await process.stdout.readline()).decode().split()
        assert ready[0] == "READY"
        async with open_channel(f"127.0.0.1:{ready[1]}") as channel:
            yield process, channel
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def status_of(channel: grpc.aio.Channel) -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


async def wait_for_serving(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(10):
        while await status_of(channel) != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110 - health is asked
            await asyncio.sleep(0.05)


async def read_to_the_end(call: grpc.aio.UnaryStreamCall) -> list[answers_pb2.AskResponse]:
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_running_answer_is_finished_before_the_process_ends(number: signal.Signals) -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    verifier.delay_s = 0.1
    async with (
        serving_verifier(verifier) as verifier_server,
        serving_drafter(drafter) as drafter_server,
        gateway("--verifier", f"127.0.0.1:{verifier_server.port}", "--drafter", f"127.0.0.1:{drafter_server.port}") as (
            process,
            channel,
        ),
    ):
        await wait_for_serving(channel)
        request = answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT)
        call = answers_pb2_grpc.AnswerServiceStub(channel).Ask(request)
        await call.read()
        process.send_signal(number)
        events = await read_to_the_end(call)
        assert events[-1].HasField("finished")
        assert await asyncio.wait_for(process.wait(), 5) == 0
        stderr = (await process.stderr.read()).decode()
        assert "Traceback" not in stderr
        messages = [json.loads(line)["message"] for line in stderr.splitlines()]
        assert messages[-2:] == [f"stopping on {number.name}", "answered"]
        await until(lambda: verifier.streams.num_open == drafter.streams.num_open == 0)


async def test_an_answer_that_outlasts_the_drain_is_cut() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    verifier.hang_in_round = 1
    async with (
        serving_verifier(verifier) as verifier_server,
        gateway("--verifier", f"127.0.0.1:{verifier_server.port}") as (process, channel),
    ):
        await wait_for_serving(channel)
        request = answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT)
        call = answers_pb2_grpc.AnswerServiceStub(channel).Ask(request)
        await call.read()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0
        await until(lambda: verifier.streams.num_open == drafter.streams.num_open == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(call)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_without_a_verifier_it_runs_but_does_not_serve() -> None:
    async with gateway("--verifier", "127.0.0.1:1") as (process, channel):
        assert await status_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers_pb2_grpc.AnswerServiceStub(channel).GetServerInfo(answers_pb2.GetServerInfoRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "--verifier must be HOST:PORT"),
        (["--verifier", "a:1", "--default-num-draft-tokens", "99"], 2, "--default-num-draft-tokens must be 1 to 16"),
        (["--verifier", "a:1", "--address", "256.0.0.1:1"], 1, "cannot listen on 256.0.0.1:1"),
    ],
)
async def test_wrong_settings_end_it_with_one_clear_line(flags: list[str], code: int, message: str) -> None:
    process = await start(*flags)
    stdout, stderr = await process.communicate()
    assert process.returncode == code
    assert stdout == b""
    assert stderr.decode().splitlines()[-1].startswith(f"gateway: {message}")
    assert "Traceback" not in stderr.decode()
