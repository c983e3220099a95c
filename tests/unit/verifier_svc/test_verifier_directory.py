"""Verifiers that agree through Redis: one makes a context, the others wait; a lease that ran out; fencing; clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
import torch

from bench.redis_server import RedisServer
from foveate.context_source import ContextSource
from foveate.store import keys
from foveate.store.client import Store
from foveate.v1 import contexts_pb2, verifier_pb2
from tests.unit.verifier_svc.cold_bench import CLIP, answer, bits, cold_verifier, counters, is_written
from tests.unit.verifier_svc.serving import Served, upload
from verifier_svc import directory as directory_module
from verifier_svc.directory import Directory, Elsewhere

ID = "ab" * 32
CONTEXT = contexts_pb2.Context(name=f"contexts/{ID}", num_tokens=3)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    with redis_server.client() as client:
        client.flushall()
    return redis_server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as opened:
        yield opened


@pytest.fixture
async def pair(checkpoint: Path, server: RedisServer) -> AsyncIterator[tuple[Served, Served]]:
    settings = server.settings()
    async with cold_verifier(checkpoint, settings) as one, cold_verifier(checkpoint, settings) as two:
        await asyncio.sleep(0.05)  # both hearts beat
        yield one, two


def pool_id(served: Served) -> str:
    return served.verifier.parts.pool.handle.pool_id


def usable(served: Served, *others: Served) -> list[verifier_pb2.PrefillRequest]:
    spec, *chunks = upload(CLIP, fps=4)
    spec.usable_pool_ids.extend(pool_id(one) for one in (served, *others))
    return [spec, *chunks]


async def test_a_hundred_first_askers_on_two_verifiers_cause_one_prefill(pair: tuple[Served, Served]) -> None:
    one, two = pair
    one.verifier.device.submit(time.sleep, 0.2)
    two.verifier.device.submit(time.sleep, 0.2)
    calls = [served.prefill_events(usable(one, two)) for _ in range(50) for served in pair]
    last = [events[-1] for events in await asyncio.gather(*calls)]
    assert len({event.context.name for event in last}) == 1
    (holder,) = {event.holder_pool_id for event in last}
    assert holder in (pool_id(one), pool_id(two))
    assert sorted(counters(served).get("prefilled", 0) for served in pair) == [0, 1]
    asked = one if holder == pool_id(one) else two
    await answer(asked, last[0].context.name)


async def test_a_context_that_a_usable_verifier_holds_is_not_made_again(pair: tuple[Served, Served]) -> None:
    one, two = pair
    made = (await one.prefill_events(usable(one, two)))[-1]
    again = (await two.prefill_events(usable(one, two)))[-1]
    assert again.context.reused
    assert (again.context.name, again.holder_pool_id) == (made.context.name, pool_id(one))
    assert two.verifier.contexts.newest_first() == []
    await is_written(one)
    own = (await two.prefill_events(usable(two)))[-1]  # a caller that cannot use the other verifier
    assert own.holder_pool_id == pool_id(two)


async def test_a_dead_verifiers_holdings_do_not_count(pair: tuple[Served, Served], client: redis.Redis) -> None:
    one, two = pair
    await one.prefill_events(usable(one, two))
    await is_written(one)

    async def keep_dead() -> None:  # against its heartbeat
        while True:
            client.delete(keys.alive(pool_id(one)))
            await asyncio.sleep(0.001)

    dying = asyncio.create_task(keep_dead())
    await asyncio.sleep(0.01)
    again = (await two.prefill_events(usable(one, two)))[-1]
    dying.cancel()
    assert again.holder_pool_id == pool_id(two)
    assert torch.equal(await bits(two, again.context.name), await bits(one, again.context.name))


@pytest.fixture
async def stores(server: RedisServer) -> AsyncIterator[tuple[Store, Store]]:
    both = Store(server.settings()), Store(server.settings())
    yield both
    for store in both:
        await store.close()


async def test_who_waits_gets_what_was_made(stores: tuple[Store, Store]) -> None:
    first, second = (Directory(store, pool_id=name, ttl_s=60) for store, name in zip(stores, "ab", strict=True))
    for one in (first, second):
        one.start()
    try:
        async with first.flight(ID, "", ("b",)) as token:
            assert token == 1
            waiting = asyncio.create_task(_fly(second, usable=("a",)))
            stranger = await _fly(second, usable=("c",))  # cannot use `a`: flies too, with a newer token
            assert stranger == 2
            await asyncio.sleep(0.15)
            assert not waiting.done()
            await first.announce(CONTEXT, "", token, is_pinned=False)
        found = await waiting
        assert isinstance(found, Elsewhere)
        assert (found.pool_id, found.context) == ("a", CONTEXT)
    finally:
        for one in (first, second):
            await one.close()


async def _fly(directory: Directory, usable: tuple[str, ...]) -> int | Elsewhere:
    async with directory.flight(ID, "", usable) as found:
        return found


async def test_a_flight_that_failed_is_taken_over(stores: tuple[Store, Store]) -> None:
    first, second = (Directory(store, pool_id=name, ttl_s=60) for store, name in zip(stores, "ab", strict=True))

    async def failing() -> None:
        async with first.flight(ID, "", ("b",)):
            await asyncio.sleep(0.15)
            raise ValueError("no prefill")

    flying = asyncio.create_task(failing())
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(_fly(second, usable=("a",)))
    with pytest.raises(ValueError, match="no prefill"):
        await flying
    assert await waiting == 2


async def test_an_overtaken_writer_commits_nothing(
    pair: tuple[Served, Served], client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier hangs in the middle of a prefill until its lease has run out; the next one has a newer token."""
    one, two = pair
    monkeypatch.setattr(directory_module, "_LEASE_MS", 150)
    monkeypatch.setattr(directory_module, "_RENEW_S", 60.0)
    gate = asyncio.Event()
    obtainer = one.verifier._obtainer
    make = obtainer._make

    async def hanging(order: object) -> object:
        await gate.wait()
        return await make(order)  # type: ignore[arg-type]

    monkeypatch.setattr(obtainer, "_make", hanging)
    hung = asyncio.create_task(one.prefill_events(usable(one, two)))
    await asyncio.sleep(0.4)
    made = (await two.prefill_events(usable(one, two)))[-1]
    assert made.holder_pool_id == pool_id(two)
    await is_written(two)
    before = client.get(keys.manifest(made.context.name.removeprefix("contexts/"), "kv"))
    gate.set()
    late = (await hung)[-1]
    assert late.context.name == made.context.name
    await is_written(one)
    assert counters(one)["cold_fenced"] >= 1
    assert client.get(keys.manifest(made.context.name.removeprefix("contexts/"), "kv")) == before
    assert (await answer(one, late.context.name))[0] == (await answer(two, made.context.name))[0]


async def test_clocks_that_disagree_change_nothing(
    checkpoint: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.time_ns
    async with cold_verifier(checkpoint, server.settings()) as one:
        context = await one.prefill(CLIP, fps=4)
        expected, _ = await answer(one, context.name)
        await is_written(one)
        for hours in (-48, 48):
            monkeypatch.setattr(time, "time_ns", lambda hours=hours: now_ns() + hours * 3600 * 10**9)
            async with cold_verifier(checkpoint, server.settings()) as two:
                await asyncio.sleep(0.05)
                again = (await two.prefill_events(usable(one, two)))[-1]
                assert again.holder_pool_id == pool_id(one)
                tokens, opened = await answer(two, context.name)
                assert (tokens, opened.fetch.source) == (expected, ContextSource.COLD_KV)
                assert counters(two).get("cold_evicted", 0) == 0
            monkeypatch.undo()


async def test_a_record_that_lies_is_refused(pair: tuple[Served, Served], client: redis.Redis) -> None:
    one, two = pair
    made = (await one.prefill_events(usable(one, two)))[-1]
    await is_written(one)
    context_id = made.context.name.removeprefix("contexts/")
    for lie in (b"", b"noise", b"\x80\x04K\x01."):
        client.set(keys.record(context_id), lie)
        client.hset(keys.holders(context_id), pool_id(one), 1)
        again = (await two.prefill_events(usable(one, two)))[-1]
        assert again.context.name == made.context.name
        assert again.holder_pool_id == pool_id(two)
    assert counters(two)["record_corrupt"] >= 1


async def test_a_context_expires(checkpoint: Path, server: RedisServer, client: redis.Redis) -> None:
    async with cold_verifier(checkpoint, server.settings(), cold={"ttl_s": 1.0}) as one:
        context = await one.prefill(CLIP, fps=4)
        await is_written(one)
        one.verifier.contexts.release(context.name.removeprefix("contexts/"))
        await asyncio.sleep(1.2)
        assert not list(client.scan_iter("foveate:*:kv:*"))
        listed = await one.stub.ListHeldContexts(verifier_pb2.ListHeldContextsRequest(include_cold=True))
        assert list(listed.contexts) == []


async def test_the_pool_forgets_what_nobody_uses(pair: tuple[Served, Served]) -> None:
    one, _ = pair
    context = await one.prefill(CLIP, fps=4)
    one.verifier.contexts.expire_idle(60)
    assert len(one.verifier.contexts.newest_first()) == 1
    await is_written(one)
    await asyncio.sleep(0.02)
    one.verifier.contexts.expire_idle(0.01)
    assert one.verifier.contexts.newest_first() == []
    assert (await answer(one, context.name))[1].fetch.source == ContextSource.COLD_KV
