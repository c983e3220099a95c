"""A gateway between scripted services, in a process of its own loop: other languages' clients ask it from outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from foveate.rpc.serving import ServingConfig
from tests.fakes import FakeDrafter, FakeVerifier, ToyModel, running_stack

TEXT = "The red square moves left and then the blue circle moves right. " * 3


@pytest.fixture(scope="package")
def gateway() -> Iterator[str]:
    """The address of a gateway that serves until the tests have ended."""
    loop = asyncio.new_event_loop()
    started: threading.Event = threading.Event()
    ended = asyncio.Event()
    address: list[str] = []

    async def serve() -> None:
        verifier, drafter = FakeVerifier(ToyModel.of(TEXT)), FakeDrafter(ToyModel.of(TEXT), agreement=0.8)
        async with running_stack(verifier, drafter, serving=ServingConfig(use_reflection=True)) as stack:
            address.append(f"127.0.0.1:{stack.server.port}")
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(60)
    yield address[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join(30)
    loop.close()
