"""Registries: in memory and on a real redis-server, and what is left of the second when Redis is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.redis_server import RedisServer
from foveate.rpc.errors import Unavailable
from foveate.store import keys
from foveate.store.client import Store
from gateway.registry import Conversation, ConversationChanged, MemoryRegistry, RedisRegistry, Registry
from gateway.registry.base import ConversationTurn
from gateway.values import Role, Turn
from tests.redis_proxy import redis_proxy

CONTEXT = "contexts/" + "ab" * 32
TURN = ConversationTurn(Turn(Role.USER, "Où? 🙂"), Turn(Role.ASSISTANT, "Left."), (7, 2**31, 0))


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    with redis_server.client() as client:
        client.flushall()
    return redis_server


@pytest.fixture(params=["memory", "redis"])
async def registry(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Registry]:
    made: Registry = (
        MemoryRegistry(conversation_ttl_s=60)
        if request.param == "memory"
        else RedisRegistry(Store(server.settings()), conversation_ttl_s=60)
    )
    assert made.kind == request.param
    yield made
    await made.close()


async def test_holders(registry: Registry) -> None:
    assert await registry.holders(CONTEXT) == frozenset()
    for pool_id in ("a", "b", "a"):
        registry.note_holder(CONTEXT, pool_id)
    assert await registry.holders(CONTEXT) == {"a", "b"}
    registry.drop_holder(CONTEXT, "a")
    registry.drop_holder(CONTEXT, "c")
    assert await registry.holders(CONTEXT) == {"b"}
    registry.note_fetch_ms(CONTEXT, 12.5)
    assert (registry.fetch_ms(CONTEXT), registry.fetch_ms("contexts/other")) == (12.5, None)


async def test_conversations(registry: Registry) -> None:
    assert await registry.conversation("c", "us") is None
    await registry.keep(Conversation("c", "us", CONTEXT, (TURN,)))
    read = await registry.conversation("c", "us")
    assert read == Conversation("c", "us", CONTEXT, (TURN,), version=1)
    assert await registry.conversation("c", "them") is None
    await registry.keep(replace(read, turns=(TURN, TURN)))
    with pytest.raises(ConversationChanged):  # written by somebody who had read the first version
        await registry.keep(replace(read, turns=(TURN, TURN, TURN)))
    with pytest.raises(ConversationChanged):
        await registry.keep(Conversation("c", "us", CONTEXT, ()))
    again = await registry.conversation("c", "us")
    assert again is not None
    assert (again.version, len(again.turns)) == (2, 2)
    assert [turn.text for turn in again.history] == ["Où? 🙂", "Left."] * 2


async def test_of_many_writers_one_wins(registry: Registry) -> None:
    turns = [ConversationTurn(Turn(Role.USER, str(index)), Turn(Role.ASSISTANT, "x")) for index in range(20)]
    tries = [registry.keep(Conversation("c", "", CONTEXT, (turn,))) for turn in turns]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(result is None for result in results) == 1
    assert sum(isinstance(result, ConversationChanged) for result in results) == 19


async def test_another_gateway_reads_what_one_wrote(server: RedisServer) -> None:
    one, two = (RedisRegistry(Store(server.settings()), conversation_ttl_s=60) for _ in range(2))
    await one.keep(Conversation("c", "us", CONTEXT, (TURN,)))
    assert await two.conversation("c", "us") == Conversation("c", "us", CONTEXT, (TURN,), version=1)
    with server.client() as client:
        assert 50 < client.ttl(keys.conversation("us", "c")) <= 60
        client.hset(keys.holders("ab" * 32), "pool-9", 4)
    assert await two.holders(CONTEXT) == {"pool-9"}
    for registry in (one, two):
        await registry.close()


@pytest.mark.parametrize("lie", [b"", b"noise" * 40, b"\x80\x04K\x01.", "foreign", "flipped"])
async def test_a_conversation_that_lies_starts_over(server: RedisServer, lie: bytes | str) -> None:
    registry = RedisRegistry(Store(server.settings()), conversation_ttl_s=60)
    await registry.keep(Conversation("c", "us", CONTEXT, (TURN,)))
    await registry.keep(Conversation("d", "us", CONTEXT, (TURN,)))
    key = keys.conversation("us", "c")
    with server.client() as client:
        data = client.get(keys.conversation("us", "d") if lie == "foreign" else key)
        assert isinstance(data, bytes)
        if lie == "flipped":
            data = data[:60] + bytes([data[60] ^ 4]) + data[61:]
        client.set(key, lie if isinstance(lie, bytes) else data)
    assert await registry.conversation("c", "us") is None
    assert registry.counters()["conversation_corrupt"] == 1
    await registry.keep(Conversation("c", "us", CONTEXT, (TURN,)))
    await registry.close()


async def test_without_redis_holders_are_what_this_process_knows(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    registry = RedisRegistry(Store(server.settings(timeout_s=0.05, breaker_s=0.3)), conversation_ttl_s=60)
    registry.note_holder(CONTEXT, "a")
    assert await registry.holders(CONTEXT) == {"a"}
    with pytest.raises(Unavailable) as caught:
        await registry.conversation("c", "us")
    assert (caught.value.reason, caught.value.retry_after_s) == ("REDIS_LOST", 1.0)
    with server:
        await asyncio.sleep(0.35)
        assert await registry.conversation("c", "us") is None
    await registry.close()


async def test_a_deaf_redis_costs_one_short_wait_a_period(server: RedisServer) -> None:
    async with redis_proxy(server.port) as proxy:
        proxy.is_deaf = True
        settings = RedisServer.settings(proxy, timeout_s=0.05, breaker_s=30.0)  # type: ignore[arg-type]
        registry = RedisRegistry(Store(settings), conversation_ttl_s=60)
        registry.note_holder(CONTEXT, "a")
        took_s = []
        for _ in range(20):
            before_s = time.perf_counter()
            assert await registry.holders(CONTEXT) == {"a"}
            took_s.append(time.perf_counter() - before_s)
        assert took_s[0] < 0.05 + 0.05
        assert sorted(took_s[1:])[-2] < 0.01
        counters = registry.counters()
        assert (counters["redis_failures"], counters["redis_skipped"], counters["breaker_opened"]) == (1, 19, 1)
        await registry.close()


async def test_a_cancelled_command_leaves_its_reply_to_nobody(server: RedisServer) -> None:
    with server.client() as client:
        for index in range(20):
            client.hset(keys.holders(f"{index:064x}"), f"pool-{index}", 1)
    async with redis_proxy(server.port) as proxy:
        registry = RedisRegistry(Store(RedisServer.settings(proxy)), conversation_ttl_s=60)  # type: ignore[arg-type]
        for index in range(0, 20, 2):
            proxy.delay_s = 0.02
            asking = asyncio.create_task(registry.holders(f"contexts/{index:064x}"))
            await asyncio.sleep(0.001 * index)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            proxy.delay_s = 0.0
            assert await registry.holders(f"contexts/{index + 1:064x}") == {f"pool-{index + 1}"}
        assert registry.counters()["breaker_opened"] == 0
        await registry.close()


async def test_memory_is_bounded_and_forgets_old_conversations() -> None:
    now = 0.0
    registry = MemoryRegistry(conversation_ttl_s=10, clock=lambda: now)
    await registry.keep(Conversation("c", "", CONTEXT, (TURN,)))
    now = 10.0
    assert await registry.conversation("c", "") is not None
    now = 10.1
    assert await registry.conversation("c", "") is None
    for index in range(20_100):
        registry.note_holder(f"contexts/{index}", "a")
    assert await registry.holders("contexts/0") == frozenset()
    assert await registry.holders("contexts/20099") == {"a"}
