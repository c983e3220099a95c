"""One real stack that tells all it can: spans and metrics to a receiver here, metrics to whoever scrapes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.otlp import Receiver, receiving
from bench.world import held_out, write_mp4
from foveate.checkpoints import default_checkpoint
from foveate.client import Client, Context
from foveate.stack import Stack, StackConfig


@pytest.fixture(scope="package")
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture(scope="package")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="package")
def stack(receiver: Receiver, logs: Path) -> Iterator[Stack]:
    metrics = ("--metrics-address", "127.0.0.1:0")
    config = StackConfig(
        default_checkpoint(),
        pool_mib=64,
        log_dir=logs,
        extra_verifier_arguments=metrics,
        extra_drafter_arguments=metrics,
        extra_gateway_arguments=metrics,
    )
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # for the services only: what this process makes is not recorded
            for name, value in receiver.environment(OTEL_TRACES_SAMPLER="parentbased_always_off").items():
                patch.setenv(name, value)
            running = stack.enter_context(Stack(config))
        yield running


@pytest.fixture(scope="package")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.addresses.gateway, timeout_s=120) as connected:
        yield connected


@pytest.fixture(scope="package")
def context(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Context:
    video = tmp_path_factory.mktemp("media") / "clip.mp4"
    write_mp4(held_out("describe", 0, num_frame_pairs=8).world, video, fps=4.0)
    return client.create_context(video, fps=4.0)
