"""A drafter as a real service, beside a real pool that the engine itself prefilled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import Drafter
from drafter_svc.main import SERVICE_NAME
from drafter_svc.servicer import DrafterServicer
from engine.device_thread import DeviceThread
from engine.kv_pool import KvPool
from engine.loading import LoadedModel, load_model
from foveate.rpc.channel import open_channel
from foveate.rpc.server import Server, ServiceRegistration, running
from foveate.v1 import drafter_pb2_grpc
from tests.kernels import KERNEL_CACHE
from tests.unit.drafter_svc.sequence import Sequence, make_sequence
from tests.unit.engine.tiny_model import write_tiny_checkpoint


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint)


@pytest.fixture
def pool(loaded: LoadedModel) -> Iterator[KvPool]:
    made = KvPool.create(
        loaded.layout, pool_bytes=4 << 20, device=torch.device("cpu"), model_fingerprint=loaded.fingerprint
    )
    yield made
    made.close()


@pytest.fixture
def sequence(loaded: LoadedModel, pool: KvPool) -> Sequence:
    return make_sequence(loaded, pool)


@pytest.fixture
async def drafter(checkpoint: Path) -> AsyncIterator[Drafter]:
    device = DeviceThread()
    made = await Drafter.load(DrafterConfig(checkpoint, small_model_path=checkpoint, kernel_cache=KERNEL_CACHE), device)
    yield made
    await made.close()
    device.close()


@pytest.fixture
async def server(drafter: Drafter) -> AsyncIterator[Server]:
    servicer = DrafterServicer()
    servicer.serve(drafter)
    registration = ServiceRegistration(
        SERVICE_NAME, lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server)
    )
    async with running(Server([registration], address="127.0.0.1:0"), grace_s=0) as started:
        await started.set_serving(True)
        yield started


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{server.port}") as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> drafter_pb2_grpc.DrafterServiceAsyncStub:
    return drafter_pb2_grpc.DrafterServiceStub(channel)
