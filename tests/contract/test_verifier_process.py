"""The verifier as a process: it says when it is ready, answers over the wire, drains, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foveate.rpc.channel import open_channel
from foveate.v1 import verifier_pb2, verifier_pb2_grpc
from tests.unit.engine.tiny_model import write_tiny_checkpoint
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Stream, named

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", spread=0.3)


@dataclass(frozen=True)
class Running:
    """A verifier's process, its port and a stub."""

    process: asyncio.subprocess.Process
    port: int
    media_root: Path
    temp_dir: Path


async def start(*flags: object, environment: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "verifier_svc.main",
        *map(str, flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )


def exists(path: str) -> bool:
    return Path(path).exists()


@pytest.fixture
async def verifier(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Running]:
    media_root, temp_dir = tmp_path / "media", tmp_path / "temp"
    media_root.mkdir()
    temp_dir.mkdir()
    (media_root / "clip.mp4").write_bytes(clips.clip(9))
    process = await start(
        "--pool-mib",
        16,
        "--media-root",
        media_root,
        environment={"FOVEATE_MODEL": str(checkpoint), "TMPDIR": str(temp_dir)},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(READY_TIMEOUT_S):
            line = (await process.stdout.readline()).decode().split()
        assert line[0] == "READY", line
        yield Running(process, int(line[1]), media_root, temp_dir)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_life(verifier: Running, number: signal.Signals) -> None:
    async with open_channel(f"127.0.0.1:{verifier.port}") as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        info = await stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest())
        segment = info.kv_handle.shm.path
        assert exists(segment)
        responses = [response async for response in stub.Prefill(iter(named("clip.mp4", fps=4)))]
        stream = Stream(stub.Verify())
        await stream.open(context=responses[-1].context.name, question="What?", max_tokens=20, visual_budget=0.2)
        assert len(await stream.plain(10)) == 10
        verifier.process.send_signal(number)
        verifier.process.send_signal(number)
        async with asyncio.timeout(STOP_TIMEOUT_S):  # an open stream is given its grace, then ended
            _, errors = await verifier.process.communicate()
    assert verifier.process.returncode == 0, errors.decode()
    assert b"Traceback" not in errors
    assert not exists(segment)
    assert os.listdir(verifier.temp_dir) == []


async def test_a_killed_verifiers_memory_is_swept_by_the_next(verifier: Running, checkpoint: Path) -> None:
    async with open_channel(f"127.0.0.1:{verifier.port}") as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        info = await stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest())
    verifier.process.kill()
    await verifier.process.communicate()
    assert exists(info.kv_handle.shm.path)
    successor = await start("--model", checkpoint, "--pool-mib", 16)
    assert successor.stdout is not None
    async with asyncio.timeout(READY_TIMEOUT_S):
        assert (await successor.stdout.readline()).startswith(b"READY")
    assert not exists(info.kv_handle.shm.path)
    successor.terminate()
    await successor.communicate()
    assert successor.returncode == 0


async def test_a_folder_without_a_model_is_told_in_one_line(tmp_path: Path) -> None:
    process = await start("--model", tmp_path)
    output, errors = await process.communicate()
    assert (process.returncode, output) == (1, b"")
    assert str(tmp_path) in errors.decode().strip().splitlines()[-1]
    assert "Traceback" not in errors.decode()
