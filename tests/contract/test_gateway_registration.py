"""Services register in Redis and a gateway finds them: they join, leave and are lost without a failed answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from bench.redis_server import RedisServer
from foveate.doctor import Questions, examine
from foveate.registration import RegistrationConfig, registered
from foveate.store import keys
from foveate.store.client import Store
from foveate.store.services import ServiceKind, registered_while
from foveate.store.services import registered as read_list
from foveate.v1 import records_pb2
from gateway.config import GatewayConfig
from gateway.listing import FORGET_S, RegisteredPeers
from tests.fakes import (
    FakeDrafter,
    FakeVerifier,
    Stack,
    ToyModel,
    ask,
    serving_drafter,
    serving_gateway,
    serving_verifier,
    until,
)

TEXT = "The red square moves left and then the blue circle moves right. " * 3
MODEL = ToyModel.of(TEXT)
KINDS = {FakeVerifier: ServiceKind.VERIFIER, FakeDrafter: ServiceKind.DRAFTER}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


async def eventually(is_true: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(5):
        while not await is_true():  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.005)


class Engine:
    """A fake service that registers itself for as long as it lives, as the real ones do."""

    def __init__(self, fake: FakeVerifier | FakeDrafter, redis: RedisServer) -> None:
        self.fake = fake
        self._config = RegistrationConfig(redis.settings(), "127.0.0.1", "toys")
        self._stack = contextlib.AsyncExitStack()

    async def join(self) -> None:
        serving = serving_verifier(self.fake) if isinstance(self.fake, FakeVerifier) else serving_drafter(self.fake)
        server = await self._stack.enter_async_context(serving)
        record = records_pb2.ServiceRecord(version=self.fake.version)
        await self._stack.enter_async_context(registered(self._config, KINDS[type(self.fake)], server.port, record))

    async def leave(self) -> None:
        """Unregisters, then ends: what runs on it is cut off."""
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def gateway(redis: RedisServer) -> AsyncIterator[Stack]:
    config = GatewayConfig(verifier="redis:toys", drafter="redis:toys", redis=redis.settings(), health_interval_s=0.05)
    async with serving_gateway(FakeVerifier(MODEL), FakeDrafter(MODEL), config) as stack:
        yield stack


def verifiers() -> list[FakeVerifier]:
    made = [FakeVerifier(MODEL) for _ in range(2)]
    for index, verifier in enumerate(made):
        verifier.pool_id = f"pool-{index}"
        verifier.delay_s = 0.002
    return made


async def test_services_join_and_leave_under_load_while_redis_comes_and_goes(redis: RedisServer) -> None:
    engines = [Engine(fake, redis) for fake in (*verifiers(), *(FakeDrafter(MODEL) for _ in range(2)))]
    first, second, drafter, other_drafter = engines
    async with contextlib.AsyncExitStack() as ending, gateway(redis) as stack:
        for engine in engines:
            ending.push_async_callback(engine.leave)
        peers = stack.backends
        await asyncio.gather(first.join(), drafter.join())
        await until(lambda: peers.verifiers.num_ready == 1 and peers.drafters.num_ready == 1)

        async def keep_asking() -> int:
            number = 0
            while not is_over.is_set():
                assert (await ask(stack)).text == TEXT
                number += 1
            return number

        is_over = asyncio.Event()
        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        await asyncio.gather(second.join(), other_drafter.join())
        await until(lambda: peers.verifiers.num_ready == 2 and peers.drafters.num_ready == 2)
        await asyncio.gather(first.leave(), drafter.leave())
        await until(lambda: peers.verifiers.num_ready == 1 and peers.drafters.num_ready == 1)
        redis.kill()
        await asyncio.sleep(0.5)
        assert peers.verifiers.num_ready == peers.drafters.num_ready == 1
        redis.start()  # empty: nobody has registered again yet
        await asyncio.sleep(0.5)
        assert peers.verifiers.num_ready == peers.drafters.num_ready == 1
        await first.join()
        await until(lambda: peers.verifiers.num_ready == 2)
        is_over.set()
        assert min(await asyncio.gather(*asking)) > 0


async def test_the_doctor_shows_who_registers(redis: RedisServer) -> None:
    config = RegistrationConfig(redis.settings(), "h:1", "toys")
    told = records_pb2.ServiceRecord(version="9.9", model="tiny", shm_namespace_id="abcdef0123:5")
    async with registered(config, ServiceKind.DRAFTER, 9, told):
        store = Store(redis.settings())
        await eventually(lambda: _is_listed(store, ServiceKind.DRAFTER))
        await store.close()
        findings = await asyncio.to_thread(examine, Questions(redis=redis.url, fleet="toys"))
    (shown,) = [one for one in findings if one.subject.startswith("registered")]
    assert shown.subject == "registered drafter"
    assert shown.found == "h:1: tiny, Foveate 9.9, shared memory of host abcdef01"


async def _is_listed(store: Store, kind: ServiceKind) -> bool:
    return bool((await read_list(store, kind, "toys")).living)


async def test_who_leaves_is_gone_at_once_and_does_not_take_its_successor_along(redis: RedisServer) -> None:
    store = Store(redis.settings())

    async def listed() -> tuple[list[str], frozenset[str]]:
        found = await read_list(store, ServiceKind.VERIFIER, "toys")
        return [record.instance_id for record in found.living], found.leaving

    def one(instance_id: str) -> contextlib.AbstractAsyncContextManager[None]:
        record = records_pb2.ServiceRecord(address="h:1", instance_id=instance_id)
        return registered_while(store, ServiceKind.VERIFIER, "toys", record)

    async def is_listed(instance_id: str) -> bool:
        return (await listed())[0] == [instance_id]

    async with contextlib.AsyncExitStack() as second:
        async with one("first"):
            await eventually(lambda: is_listed("first"))
            await second.enter_async_context(one("second"))  # started again at the same address
            await eventually(lambda: is_listed("second"))
        assert await is_listed("second")
    assert await listed() == ([], frozenset({"h:1"}))
    await store.close()


async def test_who_is_not_listed_is_kept_for_a_while_and_a_damaged_entry_counts_as_none(redis: RedisServer) -> None:
    now_s = 0.0
    store = Store(redis.settings())
    known = RegisteredPeers(store, ServiceKind.DRAFTER, clock=lambda: now_s)
    config = RegistrationConfig(redis.settings(), "h:1", "toys")
    async with registered(config, ServiceKind.DRAFTER, 9, records_pb2.ServiceRecord()):
        await eventually(lambda: known("toys"))
        assert await known("toys") == ("h:1",)
        assert await known("others") == ()
    assert await known("toys") == ()  # it said that it leaves
    async with registered(config, ServiceKind.DRAFTER, 9, records_pb2.ServiceRecord()):
        await eventually(lambda: known("toys"))
        with redis.client() as client:
            client.flushall()
            assert await known("toys") == ("h:1",)
            now_s = FORGET_S - 0.1
            assert await known("toys") == ("h:1",)
            redis.kill()
            now_s = 1000.0
            assert await known("toys") == ("h:1",)
            redis.start()
            await asyncio.sleep(0.25)  # the breaker
            assert await known("toys") == ("h:1",)
            client.flushall()
            client.hset(keys.services("drafter", "toys"), "h:2", b"no record")
            now_s += FORGET_S + 0.1
            assert await known("toys") == ()
    await store.close()


async def test_an_entry_whose_lease_has_ended_is_not_listed(redis: RedisServer) -> None:
    store = Store(redis.settings())
    config = RegistrationConfig(redis.settings(), "h:1", "toys")

    async with registered(config, ServiceKind.VERIFIER, 9, records_pb2.ServiceRecord()):
        await eventually(lambda: _is_listed(store, ServiceKind.VERIFIER))
        with redis.client() as client:
            client.zadd(keys.leases("verifier", "toys"), {"h:1": 1})
            found = await read_list(store, ServiceKind.VERIFIER, "toys")
            assert (found.living, found.leaving) == ((), frozenset())
            assert client.hlen(keys.services("verifier", "toys")) == 0
    await store.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verifier": "redis:"}, "needs --redis"),
        ({"verifier": "h:1", "drafter": "redis:x"}, "needs --redis"),
    ],
)
def test_a_list_needs_a_redis(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatewayConfig(**settings)  # type: ignore[arg-type]


def test_a_fleets_name_is_checked(redis: RedisServer) -> None:
    with pytest.raises(ValueError, match="no name of a fleet"):
        GatewayConfig(verifier="redis:a b", redis=redis.settings())
