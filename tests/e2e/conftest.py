"""One real stack for most tests: three processes, the embedded tiny checkpoint, real video files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.world import held_out, write_mp4
from foveate.checkpoints import default_checkpoint
from foveate.client import Client, Context
from foveate.stack import Stack, StackConfig
from tests.e2e.support import FPS, MAX_THREAD_TOKENS, POOL_MIB, Services, wait_until


@pytest.fixture(scope="package")
def model() -> Path:
    """The checkpoint under test; FOVEATE_TEST_MODEL names another one."""
    named = os.environ.get("FOVEATE_TEST_MODEL")
    return Path(named) if named else default_checkpoint()


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The media root of the stack: clip.mp4 (12 s), other.mp4, long.mp4."""
    root = tmp_path_factory.mktemp("media")
    for name, index, num_frame_pairs in (("clip", 0, 24), ("other", 1, 8), ("long", 2, 400)):
        write_mp4(held_out("describe", index, num_frame_pairs=num_frame_pairs).world, root / f"{name}.mp4", fps=FPS)
    return root


@pytest.fixture(scope="package")
def video(folder: Path) -> Path:
    return folder / "clip.mp4"


@pytest.fixture(scope="package")
def stack(model: Path, folder: Path) -> Iterator[Stack]:
    config = StackConfig(
        model=model,
        media_root=folder,
        pool_mib=POOL_MIB,
        deterministic=True,
        extra_verifier_arguments=("--max-thread-tokens", str(MAX_THREAD_TOKENS)),
    )
    with Stack(config) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.addresses.gateway, timeout_s=120) as connected:
        yield connected


@pytest.fixture
def context(client: Client, video: Path) -> Context:
    return client.create_context(video, fps=FPS)


@pytest.fixture
def services(stack: Stack) -> Iterator[Services]:
    asked = Services(stack)
    yield asked
    asked.close()


@pytest.fixture(autouse=True)
def nothing_is_held(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared stack, whatever it did, no answer is open and the gateway serves."""
    yield
    if "services" not in request.fixturenames and "client" not in request.fixturenames:
        return
    stack: Stack = request.getfixturevalue("stack")
    assert wait_until(lambda: stack.num_sequences() == 0, 5)
    with Client(stack.addresses.gateway) as connected:
        assert connected.is_serving()
