"""One real stack for most tests: three processes, the embedded tiny checkpoint, real video files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from bench.world import held_out, write_mp4
from foveate.checkpoints import default_checkpoint
from foveate.client import Answer, AskOptions, Client, Context, DraftMode
from foveate.rpc.channel import CHANNEL_OPTIONS
from foveate.stack import Stack, StackConfig
from foveate.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

MAX_THREAD_TOKENS = 512
POOL_MIB = 256
FPS = 4.0


@pytest.fixture(scope="session")
def model() -> Path:
    """The checkpoint under test; FOVEATE_TEST_MODEL names another one."""
    named = os.environ.get("FOVEATE_TEST_MODEL")
    return Path(named) if named else default_checkpoint()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The media root of the stack: clip.mp4 (12 s), other.mp4, long.mp4."""
    root = tmp_path_factory.mktemp("media")
    for name, index, num_frame_pairs in (("clip", 0, 24), ("other", 1, 8), ("long", 2, 400)):
        write_mp4(held_out("describe", index, num_frame_pairs=num_frame_pairs).world, root / f"{name}.mp4", fps=FPS)
    return root


@pytest.fixture(scope="session")
def video(folder: Path) -> Path:
    return folder / "clip.mp4"


@pytest.fixture(scope="session")
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


@dataclass(frozen=True)
class Load:
    """What an engine service holds right now."""

    num_sequences: int
    pool_used_bytes: int


class Services:
    """Asks verifier and drafter themselves what they hold."""

    def __init__(self, stack: Stack) -> None:
        addresses = stack.addresses
        self._verifier_channel = grpc.insecure_channel(addresses.verifier, options=CHANNEL_OPTIONS)
        self._drafter_channel = grpc.insecure_channel(addresses.drafter or "", options=CHANNEL_OPTIONS)
        self._verifier = verifier_pb2_grpc.VerifierServiceStub(self._verifier_channel)
        self._drafter = drafter_pb2_grpc.DrafterServiceStub(self._drafter_channel)

    def verifier(self) -> Load:
        info = self._verifier.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=10)
        return Load(info.num_sequences, info.pool_used_bytes)

    def num_drafter_sequences(self) -> int:
        return int(self._drafter.GetDrafterInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=10).num_sequences)

    def close(self) -> None:
        self._verifier_channel.close()
        self._drafter_channel.close()


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


def wait_until(is_true: Callable[[], bool], limit_s: float) -> bool:
    """Polls until `is_true`, for at most `limit_s` seconds."""
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def long_answer(client: Client, context: Context) -> tuple[Answer, AskOptions]:
    """Returns a plain answer of many tokens and the options that give it again: so hot that it hardly ever ends."""
    for seed in range(20):
        options = AskOptions(temperature=5.0, seed=seed, max_tokens=200)
        answer = client.ask(context, "Describe the video.", draft=DraftMode.OFF, **options)
        if answer.num_output_tokens == 200:
            return answer, options
    raise AssertionError("no seed gives a long answer")
