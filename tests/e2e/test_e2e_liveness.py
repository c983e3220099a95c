"""Cancelling frees at once (case G1), health answers during a long prefill (case G6)."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foveate.client import Client, Context
from foveate.rpc.channel import CHANNEL_OPTIONS
from foveate.rpc.errors import Cancelled, DeadlineExceeded
from foveate.stack import Stack
from tests.e2e.support import FPS, Load, Services, long_answer, wait_until

NUM_CANCELLED = 5
FREED_WITHIN_S = 0.2
HEALTHY_WITHIN_S = 0.2


def test_a_cancelled_answer_is_freed_within_200_ms(client: Client, context: Context, services: Services) -> None:
    _, options = long_answer(client, context)
    before = _idle_pool_bytes(services)
    freed_s = [_cancel_after_three_tokens(client, context, services, options, before) for _ in range(NUM_CANCELLED)]
    assert statistics.median(freed_s) < FREED_WITHIN_S
    assert services.num_drafter_sequences() == 0


def _idle_pool_bytes(services: Services) -> int:
    # What contexts hold: an answer's memory follows its sequence by some milliseconds.
    assert wait_until(lambda: services.verifier().num_sequences == 0, 5)
    time.sleep(0.3)
    return services.verifier().pool_used_bytes


def _cancel_after_three_tokens(
    client: Client, context: Context, services: Services, options: object, before: int
) -> float:
    with client.stream(context, "Describe the video.", **options) as stream:  # type: ignore[arg-type]
        num_tokens = 0
        while num_tokens < 3:
            num_tokens += len(next(stream).token_ids)
        assert services.verifier().num_sequences == 1
        started_s = time.monotonic()
        stream.cancel()
        with pytest.raises(Cancelled):
            next(stream)

    def is_freed() -> bool:
        load = services.verifier()
        return load.num_sequences == 0 and load.pool_used_bytes == before and services.num_drafter_sequences() == 0

    assert wait_until(is_freed, 5)
    return time.monotonic() - started_s


def test_a_deadline_in_mid_answer_frees_everything(client: Client, context: Context, services: Services) -> None:
    _, options = long_answer(client, context)
    before = _idle_pool_bytes(services)
    with pytest.raises(DeadlineExceeded):
        client.ask(context, "Describe the video.", **{**options, "timeout_s": 0.05})
    assert wait_until(lambda: services.verifier() == Load(num_sequences=0, pool_used_bytes=before), 2)
    assert wait_until(lambda: services.num_drafter_sequences() == 0, 2)


def test_health_answers_during_a_long_prefill(stack: Stack, client: Client, folder: Path) -> None:
    made: list[Context] = []
    prefilling = threading.Thread(target=lambda: made.append(client.create_context(folder / "long.mp4", fps=FPS)))
    prefilling.start()
    addresses = (stack.addresses.gateway, stack.addresses.verifier)
    try:
        latencies_s = [_check_health_while(prefilling.is_alive, address) for address in addresses * 50]
    finally:
        prefilling.join()
    during = [latency_s for latency_s in latencies_s if latency_s is not None]
    client.delete_context(made[0])
    assert len(during) >= 4, "the prefill was over too soon to measure anything"
    assert sorted(during)[int(0.9 * len(during))] < HEALTHY_WITHIN_S


def _check_health_while(is_busy: Callable[[], bool], address: str) -> float | None:
    time.sleep(0.02)
    if not is_busy():
        return None
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=10)  # connects
        started_s = time.monotonic()
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status
        latency_s = time.monotonic() - started_s
    assert status == health_pb2.HealthCheckResponse.SERVING
    return latency_s
