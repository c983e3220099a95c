"""Many values over several connections: threads of their own, one connection each, one deadline for all.

The memory that values point into belongs to the caller, who may free it as soon as `read` or `write` has returned or
raised: both wait for every thread, also when they are cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from foveate.store.address import Endpoint, RedisAddress, Topology
from foveate.store.errors import Unreachable
from verifier_svc.cold.bulk import BulkConnection, Moved, Value

_cluster_node = cast(Any, ClusterNode)
_BATCH = 8  # values that a thread takes at a time
Work = Callable[[BulkConnection, Sequence[Value]], None]


class Transfer:
    """Reads and writes values with `num_connections` threads."""

    def __init__(self, address: RedisAddress, *, num_connections: int, connect_timeout_s: float) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._threads = ThreadPoolExecutor(num_connections, thread_name_prefix="cold")
        self._own = threading.local()
        self._open: set[BulkConnection] = set()
        self._cluster: RedisCluster | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Waits for what runs and closes the connections."""
        self._threads.shutdown(wait=True)
        for connection in self._open:
            connection.close()
        self._forget_cluster()

    async def read(self, values: Sequence[Value], *, deadline_s: float, check: Callable[[Value], None]) -> None:
        """Fills every payload and runs `check` on it. Raises the first StoreError, after every thread has stopped."""

        def work(connection: BulkConnection, batch: Sequence[Value]) -> None:
            connection.read(batch, deadline_s=deadline_s)
            for value in batch:
                check(value)

        await self._spread(values, work)

    async def write(self, values: Sequence[Value], *, ttl_ms: int, deadline_s: float) -> None:
        """Sets every value. Raises as `read`."""
        await self._spread(
            values, lambda connection, batch: connection.write(batch, ttl_ms=ttl_ms, deadline_s=deadline_s)
        )

    async def _spread(self, values: Sequence[Value], work: Work) -> None:
        stop = threading.Event()
        batches = [values[start : start + _BATCH] for start in range(0, len(values), _BATCH)]
        loop = asyncio.get_running_loop()
        if not batches:
            return
        running = [loop.run_in_executor(self._threads, self._run, batch, work, stop) for batch in batches]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            # The first error or a cancellation: what has not begun is skipped, what runs ends within its deadline.
            stop.set()
            await _settled(running)
        for one in running:
            one.result()

    def _run(self, batch: Sequence[Value], work: Work, stop: threading.Event) -> None:
        if stop.is_set():
            return
        try:
            try:
                self._work(batch, work)
            except Moved:  # what was known of the cluster's slots is forgotten: now the right node is found
                self._work(batch, work)
        except BaseException:
            stop.set()
            raise

    def _work(self, batch: Sequence[Value], work: Work) -> None:
        try:
            connection = self._connection(batch[0].key)
        except BaseException:
            self._forget_cluster()
            raise
        try:
            work(connection, batch)
        except BaseException:
            self._drop(connection)
            raise

    def _connection(self, key: str) -> BulkConnection:
        endpoint = self._endpoint(key)
        mine: dict[Endpoint, BulkConnection] = self._own.__dict__.setdefault("connections", {})
        connection = mine.get(endpoint)
        if connection is None:
            connection = mine[endpoint] = BulkConnection(endpoint, self._address, timeout_s=self._connect_timeout_s)
            with self._lock:
                self._open.add(connection)
        return connection

    def _drop(self, connection: BulkConnection) -> None:
        connection.close()
        mine: dict[Endpoint, BulkConnection] = self._own.connections
        for endpoint in [endpoint for endpoint, one in mine.items() if one is connection]:
            del mine[endpoint]
        with self._lock:
            self._open.discard(connection)
        self._forget_cluster()

    def _forget_cluster(self) -> None:
        """Drops what is known of a cluster's slots: one of them may have moved."""
        with self._lock:
            cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cast(Any, cluster).close()

    def _endpoint(self, key: str) -> Endpoint:
        # Asked again for every batch: after a failover or a resharding the next transfer goes to the right server.
        if self._address.topology is Topology.SINGLE:
            return self._address.nodes[0]
        try:
            return self._find(key)
        except (RedisError, OSError) as error:
            raise Unreachable(f"no Redis master can be found: {type(error).__name__}") from error

    def _find(self, key: str) -> Endpoint:
        address, timeout_s = self._address, self._connect_timeout_s
        if address.topology is Topology.SENTINEL:
            hosts = [(node.host, node.port) for node in address.nodes]
            finder: Any = cast(Any, Sentinel)(hosts, socket_timeout=timeout_s)
            try:
                host, port = finder.discover_master(address.service)
            finally:
                for one in finder.sentinels:
                    one.close()
            return Endpoint(str(host), int(port))
        cluster = self._cluster_nodes()
        node = cast(Any, cluster).get_node_from_key(key)
        if node is None:
            raise redis.exceptions.ClusterError("no node for the key's slot")
        return Endpoint(str(node.host), int(node.port))

    def _cluster_nodes(self) -> RedisCluster:
        with self._lock:
            if self._cluster is None:
                self._cluster = RedisCluster(
                    startup_nodes=[_cluster_node(node.host, node.port) for node in self._address.nodes],
                    username=self._address.username,
                    password=self._address.password,
                    socket_timeout=self._connect_timeout_s,
                    socket_connect_timeout=self._connect_timeout_s,
                    retry=Retry(NoBackoff(), 0),
                )
            return self._cluster


async def _settled(running: Sequence[asyncio.Future[None]]) -> None:
    """Waits until all have ended; a cancellation that comes meanwhile is passed on only then."""
    cancelled = False
    while not all(one.done() for one in running):
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        for one in running:
            one.exception()
        raise asyncio.CancelledError
