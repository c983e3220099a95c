"""What stays true while the device works or a caller leaves: cancel, memory, health, start and stop of the process."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from drafter_svc.drafter import Drafter
from drafter_svc.main import main, parse_config
from drafter_svc.servicer import DrafterServicer
from drafter_svc.sparse import SparseSequence
from engine.kv_pool import KvPool
from engine.loading import LoadedModel
from engine.runner import TextRunner
from foveate.rpc.errors import Unavailable
from foveate.v1 import drafter_pb2, drafter_pb2_grpc
from tests.unit.drafter_svc.sequence import make_sequence
from tests.unit.drafter_svc.stream import Stream

if TYPE_CHECKING:
    from foveate.v1.drafter_pb2_grpc import DrafterServiceAsyncStub as Stub
ROOT = Path(__file__).parents[3]


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Makes each of the drafter's steps take 50 ms and returns the times at which they began."""
    began: list[float] = []
    forward = TextRunner.forward

    def slow(self: TextRunner, **arguments: object) -> object:
        began.append(time.monotonic())
        time.sleep(0.05)
        return forward(self, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TextRunner, "forward", slow)
    return began


@pytest.fixture
def scratches(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[SparseSequence]]:
    """Weak references to the sequences that the drafter makes."""
    made: list[weakref.ref[SparseSequence]] = []
    init = SparseSequence.__init__

    def noted(self: SparseSequence, *arguments: object) -> None:
        made.append(weakref.ref(self))
        init(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SparseSequence, "__init__", noted)
    return made


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition never held")


async def test_cancel_in_the_middle_of_a_draft_stops_it_and_frees_the_scratch(
    stub: Stub,
    loaded: LoadedModel,
    pool: KvPool,
    drafter: Drafter,
    scratches: list[weakref.ref[SparseSequence]],
    slow_steps: list[float],
) -> None:
    sequence = make_sequence(loaded, pool)
    slow_steps.clear()
    stream = Stream(stub.Draft())
    await stream.ask(open=sequence.open_message())
    asking = asyncio.create_task(stream.round(1, sequence.num_prompt_tokens, sequence.tokens, 16))
    await asyncio.sleep(0.12)
    assert drafter.num_sequences == 1
    begin = time.monotonic()
    stream.call.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not drafter.num_sequences and scratches[0]() is None)
    assert time.monotonic() - begin < 1.0
    num_steps = len(slow_steps)
    assert num_steps < 8
    await asyncio.sleep(0.15)
    assert len(slow_steps) == num_steps


async def test_two_hundred_cancelled_answers_leave_nothing(
    stub: Stub, loaded: LoadedModel, pool: KvPool, drafter: Drafter, scratches: list[weakref.ref[SparseSequence]]
) -> None:
    sequence = make_sequence(loaded, pool)
    for number in range(200):
        stream = Stream(stub.Draft())
        await stream.ask(open=sequence.open_message())
        if number % 2:
            await stream.call.write(
                drafter_pb2.DraftRequest(
                    request_id=7,
                    round=drafter_pb2.DraftRound(
                        sequence_id="s1",
                        round=1,
                        base_len=sequence.num_prompt_tokens,
                        token_ids=sequence.tokens,
                        num_draft_tokens=9,
                    ),
                )
            )
        stream.call.cancel()
    await until(lambda: not drafter.num_sequences)
    await drafter._device.run(gc.collect)
    assert len(scratches) == 200
    assert [reference for reference in scratches if reference() is not None] == []


async def test_half_close_ends_the_sequence(stub: Stub, loaded: LoadedModel, pool: KvPool, drafter: Drafter) -> None:
    stream = Stream(stub.Draft())
    await stream.ask(open=make_sequence(loaded, pool).open_message())
    await stream.call.done_writing()
    assert await stream.call.code() is grpc.StatusCode.OK
    assert drafter.num_sequences == 0


async def test_health_answers_while_the_device_works(
    stub: Stub, channel: grpc.aio.Channel, loaded: LoadedModel, pool: KvPool, slow_steps: list[float]
) -> None:
    sequence = make_sequence(loaded, pool)
    health = health_pb2_grpc.HealthStub(channel)
    stream = Stream(stub.Draft())
    await stream.ask(open=sequence.open_message())
    asking = asyncio.create_task(stream.round(1, sequence.num_prompt_tokens, sequence.tokens, 16))
    waits = []
    while not asking.done():
        begin = time.monotonic()
        reply = await health.Check(health_pb2.HealthCheckRequest(service="foveate.v1.DrafterService"))
        waits.append(time.monotonic() - begin)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        await asyncio.sleep(0.02)
    assert len(await asking) == 16
    assert len(waits) > 5
    assert max(waits) < 0.2
    stream.call.cancel()


async def test_calls_before_the_model_is_there_are_unavailable() -> None:
    servicer = DrafterServicer()
    with pytest.raises(Unavailable, match="loading"):
        await servicer.GetDrafterInfo(drafter_pb2.GetDrafterInfoRequest(), None)  # type: ignore[arg-type]


def test_the_process_serves_and_ends_on_sigterm(checkpoint: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "drafter_svc.main", "--model", str(checkpoint)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        word, port = process.stdout.readline().split()
        assert word == "READY"
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            assert stub.GetDrafterInfo(drafter_pb2.GetDrafterInfoRequest()).model == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_a_folder_that_is_no_checkpoint_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["drafter", "--model", str(tmp_path)])
    assert main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"drafter: {tmp_path} lacks config.json, tokenizer.json" in err.splitlines()


def test_flags_win_over_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(["--model", "m", "--threads", "3"], {"FOVEATE_THREADS": "2", "FOVEATE_DTYPE": "bfloat16"})
    assert (config.num_threads, config.dtype) == (3, "bfloat16")
    for arguments in ([], ["--model", "m", "--threads", "0"]):
        with pytest.raises(SystemExit):
            parse_config(arguments, {})
    assert "--threads" in capsys.readouterr().err
