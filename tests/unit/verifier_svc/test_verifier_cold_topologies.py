"""The cold tier and the directory on a Redis cluster, and on a Redis that sentinels watch: real processes of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from foveate.context_source import ContextSource
from foveate.store import keys
from foveate.store.errors import StoreError
from foveate.v1 import verifier_pb2
from tests import redis_topologies
from tests.redis_topologies import Cluster, Topology, Watched
from tests.unit.verifier_svc.cold_bench import CLIP, OTHER, answer, bits, cold_verifier, counters, is_written
from tests.unit.verifier_svc.serving import Served


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with redis_topologies.cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with redis_topologies.watched(tmp_path) as started:
        yield started


@pytest.fixture(params=["cluster", "watched"])
def topology(request: pytest.FixtureRequest) -> Topology:
    started: Topology = request.getfixturevalue(request.param)
    started.flush()
    return started


@pytest.fixture
async def pair(checkpoint: Path, topology: Topology) -> AsyncIterator[tuple[Served, Served]]:
    settings = redis_topologies.settings(topology.url)
    async with cold_verifier(checkpoint, settings) as one, cold_verifier(checkpoint, settings) as two:
        yield one, two


def move(topology: Topology, context: str) -> None:
    """Puts a context's keys on another server."""
    if isinstance(topology, Cluster):
        topology.move(keys.record(context.removeprefix("contexts/")))
    else:
        assert isinstance(topology, Watched)
        topology.fail_over()


async def is_found(served: Served, context: str) -> bool:
    """Tells whether a verifier finds a context's copies; after a failover that takes a breaker's period."""
    assert served.verifier.redis is not None
    try:
        return bool(await served.verifier.redis.cold.find(context.removeprefix("contexts/"), ""))
    except StoreError:
        return False


async def test_a_context_is_written_found_listed_pinned_and_deleted(
    pair: tuple[Served, Served], topology: Topology
) -> None:
    first, second = pair
    made = [await first.prefill(data, fps=4) for data in (CLIP, OTHER)]
    expected = [await answer(first, context.name) for context in made]
    await is_written(first)
    if isinstance(topology, Cluster):
        assert sum(count > 0 for count in topology.num_keys()) > 1
    listed = await second.verifier.listed_contexts("", include_cold=True, context_id=None)
    assert {context.name for context in listed} == {context.name for context in made}
    for context, (tokens, _) in zip(made, expected, strict=True):
        restored, opened = await answer(second, context.name)
        assert restored == tokens
        assert opened.fetch.source == ContextSource.COLD_KV
        assert torch.equal(await bits(second, context.name), await bits(first, context.name))
    pinned = await second.verifier.touch_context(made[0].name.removeprefix("contexts/"), "", pinned=True)
    assert pinned.pinned
    for served in pair:
        await served.stub.ReleaseContext(verifier_pb2.ReleaseContextRequest(name=made[0].name))
    left = await second.verifier.listed_contexts("", include_cold=True, context_id=None)
    assert [context.name for context in left] == [made[1].name]
    for served in pair:
        counted = counters(served)
        assert (counted.get("redis_failures", 0), counted.get("redis_refused", 0)) == (0, 0), counted
        assert not [name for name in counted if name in ("cold_unreachable", "cold_corrupt", "cold_unwritten")]


async def test_keys_that_move_to_another_server_are_found_there(
    pair: tuple[Served, Served], topology: Topology
) -> None:
    first, second = pair
    context, other = [await first.prefill(data, fps=4) for data in (CLIP, OTHER)]
    tokens, _ = await answer(first, context.name)
    await is_written(first)
    await answer(second, other.name)  # it knows now where everything is
    move(topology, context.name)
    async with asyncio.timeout(20):
        while not await is_found(second, context.name):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.1)
    restored, opened = await answer(second, context.name)
    assert restored == tokens
    assert opened.fetch.source == ContextSource.COLD_KV
    assert torch.equal(await bits(second, context.name), await bits(first, context.name))
