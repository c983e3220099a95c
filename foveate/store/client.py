"""Small commands to Redis, each with a deadline and behind one breaker. Bulk data goes elsewhere (the cold tier).

Finding the nodes of a cluster, or the master that sentinels name, takes longer than a command may. It is done behind
the commands' backs, and again after every failure: that is how a failover is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import redis.asyncio as aioredis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ReadOnlyError, RedisError, ResponseError

from foveate.store.address import RedisAddress, Topology
from foveate.store.breaker import Breaker
from foveate.store.errors import Corrupt, Full, StoreError, Unreachable

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FIND_S = 2.0  # to find the nodes of a cluster, or a master


@dataclass(frozen=True)
class StoreSettings:
    """Where Redis is and how long to wait for it.

    A small command takes at most `timeout_s`; after a failure nobody tries again for `breaker_s`.
    """

    address: RedisAddress
    timeout_s: float = 0.05
    breaker_s: float = 5.0


class Store:
    """Small commands. Every failure is a StoreError; `counters` tell the operator how often."""

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings
        self.breaker = Breaker(settings.breaker_s)
        self.counters: Counter[str] = Counter()
        self._client: Any = None
        self._finding: asyncio.Task[Any] | None = None
        self._is_closed = False

    async def close(self) -> None:
        """Closes the connections for good."""
        self._is_closed = True
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            await _close(client)

    async def run(self, command: Callable[[Any], Awaitable[T]], *, timeout_s: float | None = None) -> T:
        """Runs `command(client)` within the deadline.

        Raises Unreachable, Full (no room, no writes), or Corrupt when a key holds something of another type.
        """
        if self._is_closed:
            raise Unreachable("the store is closed")
        if not self.breaker.admits():
            self.counters["redis_skipped"] += 1
            raise Unreachable("Redis did not answer a moment ago; not asked again yet")
        client = None
        try:
            async with asyncio.timeout(timeout_s or self.settings.timeout_s):
                client = await self._connected()
                result = await command(client)
        except (TimeoutError, OSError, RedisError) as error:
            raise self._failure(error, client) from error
        except BaseException:
            # redis-py drops a connection whose command was cancelled, so its reply reaches nobody else.
            self.breaker.abandoned()
            raise
        self.breaker.succeeded()
        return result

    async def script(self, text: str, keys: list[str], args: list[Any]) -> Any:
        """Runs a Lua script on keys of one slot."""
        return await self.run(lambda client: client.eval(text, len(keys), *keys, *args))

    def _failure(self, error: Exception, client: Any) -> StoreError:
        is_answer = isinstance(error, ResponseError) and not isinstance(error, BusyLoadingError | ReadOnlyError)
        if is_answer:  # the server works; it did not like this command
            self.breaker.succeeded()
            self.counters["redis_refused"] += 1
            if str(error).startswith(("OOM", "MISCONF")) or "OOM command" in str(error):
                return Full(str(error))
            return Corrupt(str(error))
        was_open = self.breaker.is_open
        self.breaker.failed()
        if client is not None and client is self._client and self._finding is not None:
            self._finding = asyncio.create_task(self._find())  # the next command finds them there
        self.counters["redis_failures"] += 1
        if not was_open:
            logger.warning(
                "Redis at %s does not answer (%s); going on without it", self.settings.address, type(error).__name__
            )
        return Unreachable(f"Redis does not answer: {type(error).__name__}")

    async def _connected(self) -> Any:
        if self.settings.address.topology is Topology.SINGLE:
            if self._client is None:
                self._client = open_client(self.settings)
            return self._client
        if self._finding is None or (self._finding.done() and self._finding.exception() is not None):
            self._finding = asyncio.create_task(self._find())
        return await asyncio.shield(self._finding)

    async def _find(self) -> Any:
        client, self._client = self._client, None
        if client is not None:
            await _close(client)
        self._client = open_client(self.settings)
        async with asyncio.timeout(_FIND_S):
            await self._client.ping()
        return self._client


async def _close(client: Any) -> None:
    finder = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for one in (client, *(finder.sentinels if finder else ())):  # redis-py leaves those to the sentinels open
        with contextlib.suppress(Exception):
            await one.aclose()


def open_client(settings: StoreSettings) -> Any:
    """Returns a redis-py asyncio client that never retries by itself; connecting happens with the first command."""
    address = settings.address
    timeout_s = settings.timeout_s if address.topology is Topology.SINGLE else max(settings.timeout_s, _FIND_S)
    common: dict[str, Any] = {
        "username": address.username,
        "password": address.password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
        "protocol": 2,
    }
    if address.topology is Topology.CLUSTER:
        nodes = [ClusterNode(node.host, node.port) for node in address.nodes]
        return RedisCluster(startup_nodes=nodes, **common)
    if address.topology is Topology.SENTINEL:
        hosts = [(node.host, node.port) for node in address.nodes]
        sentinels = {key: common[key] for key in ("socket_timeout", "socket_connect_timeout", "retry")}
        finder = cast(Any, Sentinel)(hosts, sentinel_kwargs=sentinels)
        return finder.master_for(address.service, db=address.db, **common)
    (node,) = address.nodes
    if node.unix_path:
        return aioredis.Redis(unix_socket_path=node.unix_path, db=address.db, **common)
    return aioredis.Redis(host=node.host, port=node.port, db=address.db, ssl=address.tls, **common)
