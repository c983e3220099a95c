"""What verifiers tell each other and the gateways through Redis: who makes a context now, and who holds it.

    flight     a lease with a fencing token: one verifier makes a context, the others wait for it
    record     what the context is, for everybody to find
    holders    pool -> fencing token; a pool counts while its heartbeat is there

A lease that ran out (its owner hung) lets the next one fly, with a higher token; what the first then commits to the
cold tier is refused. Clocks are never compared: every expiry is the server's. Without Redis, or while it does not
answer, every verifier flies on its own: a context may be made twice, and is right each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any

from foveate.store import keys, scripts
from foveate.store.client import Store
from foveate.store.errors import Corrupt, StoreError
from foveate.store.frame import Kind, pack, unpack
from foveate.v1 import contexts_pb2, records_pb2

logger = logging.getLogger(__name__)

_LEASE_MS = 8_000
_RENEW_S = 2.0
_POLL_S = 0.05
_HEARTBEAT_MS = 6_000
_HEARTBEAT_S = 2.0
_TOKEN_TTL_MS = 14 * 24 * 3600 * 1000
_MAX_LISTED = 10_000
_LIST_S = 2.0


@dataclass(frozen=True)
class Elsewhere:
    """A context that another verifier holds."""

    context: contexts_pb2.Context
    pool_id: str


class Directory:
    """One verifier's side of the directory."""

    def __init__(self, store: Store, *, pool_id: str, ttl_s: float) -> None:
        self.counters: Counter[str] = Counter()
        self._store = store
        self._pool_id = pool_id
        self._ttl_ms = int(ttl_s * 1e3)
        self._tasks: set[asyncio.Task[None]] = set()
        self._beat: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to say that this verifier lives."""
        self._beat = asyncio.create_task(self._heartbeat())

    async def close(self) -> None:
        """Says that this verifier lives no more."""
        tasks = [*self._tasks, *([self._beat] if self._beat else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._store.run(lambda client: client.delete(keys.alive(self._pool_id)))

    @contextlib.asynccontextmanager
    async def flight(self, context_id: str, tenant: str, usable: Collection[str]) -> AsyncIterator[int | Elsewhere]:
        """Yields a fencing token when the context is ours to make, or where it is.

        `usable` are the pools of other verifiers that the caller can use; those are waited for, others are not. Token 0
        means that there is no Redis to agree through.
        """
        owner = f"{self._pool_id}:{secrets.token_hex(8)}"
        found = await self._begin(context_id, tenant, owner, frozenset(usable) - {self._pool_id})
        if isinstance(found, Elsewhere) or found == 0:
            yield found
            return
        renewing = asyncio.create_task(self._renew(context_id, owner))
        try:
            yield found
        finally:
            renewing.cancel()
            await self._end(context_id, owner)

    async def announce(self, context: contexts_pb2.Context, tenant: str, token: int, *, is_pinned: bool) -> None:
        """Records a context that this verifier holds now. Raises StoreError."""
        context_id = context.name.removeprefix("contexts/")
        await self.write_record(context, tenant, is_pinned=is_pinned)
        await self._store.run(lambda client: client.hset(keys.holders(context_id), self._pool_id, token))
        await self._store.run(lambda client: client.pexpire(keys.holders(context_id), self._ttl_ms))
        created = {context_id: context.create_time.ToNanoseconds()}
        await self._store.run(lambda client: client.zadd(keys.index(tenant), created))

    async def write_record(self, context: contexts_pb2.Context, tenant: str, *, is_pinned: bool) -> None:
        """Records a context, wherever it is. Raises StoreError."""
        context_id = context.name.removeprefix("contexts/")
        record = records_pb2.ContextRecord(context_id=context_id, tenant=tenant, context=context, pinned=is_pinned)
        data, ttl_ms = pack(Kind.CONTEXT, record), None if is_pinned else self._ttl_ms
        await self._store.run(lambda client: client.set(keys.record(context_id), data, px=ttl_ms))

    async def record(self, context_id: str, tenant: str) -> records_pb2.ContextRecord | None:
        """Returns a context's record; None when there is none that is this context's. Raises Unreachable."""
        data = await self._store.run(lambda client: client.get(keys.record(context_id)))
        return None if data is None else await self._checked(data, context_id, tenant)

    async def records(self, tenant: str) -> list[records_pb2.ContextRecord]:
        """Returns the records of a tenant's contexts, newest first. Raises Unreachable."""
        ids = await self._store.run(lambda client: client.zrevrange(keys.index(tenant), 0, _MAX_LISTED - 1))
        names = [raw.decode(errors="replace") for raw in ids]

        async def get_all(client: Any) -> list[bytes | None]:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.get(keys.record(name))
            found: list[bytes | None] = await pipeline.execute()
            return found

        found = await self._store.run(get_all, timeout_s=_LIST_S) if names else []
        records = []
        for name, data in zip(names, found, strict=True):
            record = None if data is None else await self._checked(data, name, tenant)
            if record is not None:
                records.append(record)
            else:
                await self._store.run(lambda client, name=name: client.zrem(keys.index(tenant), name))  # type: ignore[misc]
        return records

    def withdraw_soon(self, context_id: str) -> None:
        """Takes this verifier off a context's holders, in the background."""
        task = asyncio.create_task(self._withdraw(context_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def forget(self, context_id: str, tenant: str) -> None:
        """Removes a context's record. Raises StoreError."""
        await self._store.run(lambda client: client.delete(keys.record(context_id), keys.holders(context_id)))
        await self._store.run(lambda client: client.zrem(keys.index(tenant), context_id))

    async def find(self, context_id: str, tenant: str, usable: Collection[str]) -> Elsewhere | None:
        """Returns a context that one of the `usable` pools holds and whose verifier lives. Raises StoreError."""
        held_by = await self._store.run(lambda client: client.hkeys(keys.holders(context_id)))
        for raw in held_by:
            pool_id = raw.decode(errors="replace")
            if pool_id not in usable or not await self._store.run(
                lambda client, pool_id=pool_id: client.exists(keys.alive(pool_id))  # type: ignore[misc]
            ):
                continue
            record = await self.record(context_id, tenant)
            return None if record is None else Elsewhere(record.context, pool_id)
        return None

    async def _checked(self, data: bytes, context_id: str, tenant: str) -> records_pb2.ContextRecord | None:
        """Returns a record that is the one asked for; another one is removed and counted."""
        try:
            record = unpack(Kind.CONTEXT, data, records_pb2.ContextRecord)
            if (record.context_id, record.context.name) == (context_id, f"contexts/{context_id}"):
                return record if record.tenant == tenant else None
        except Corrupt as error:
            logger.error("the record of %s is refused: %s", context_id, error)
        self.counters["record_corrupt"] += 1
        await self._store.run(lambda client: client.delete(keys.record(context_id), keys.holders(context_id)))
        return None

    async def _begin(self, context_id: str, tenant: str, owner: str, usable: frozenset[str]) -> int | Elsewhere:
        names = [keys.flight(context_id), keys.token(context_id)]
        waited = False
        try:
            while True:
                if usable and (elsewhere := await self.find(context_id, tenant, usable)):
                    self.counters["flights_shared"] += 1
                    return elsewhere
                token = int(await self._store.script(scripts.BEGIN_FLIGHT, names, [owner, _LEASE_MS, _TOKEN_TTL_MS]))
                if token:
                    return token
                flying = await self._store.run(lambda client: client.get(keys.flight(context_id)))
                if flying is not None and flying.decode(errors="replace").rpartition(":")[0] not in usable:
                    # That one's context could not be used from here: it is made here as well, and is the newer one.
                    return int(await self._store.run(lambda client: client.incr(keys.token(context_id))))
                self.counters["flights_waited"] += not waited
                waited = True
                await asyncio.sleep(_POLL_S)
        except StoreError:
            self.counters["flights_alone"] += 1
            return 0

    async def _renew(self, context_id: str, owner: str) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(StoreError):
                if not await self._store.script(scripts.RENEW_FLIGHT, [keys.flight(context_id)], [owner, _LEASE_MS]):
                    self.counters["flights_lost"] += 1
                    logger.warning(
                        "the lease on %s ran out after %.1f s; another verifier may make it too",
                        context_id,
                        time.monotonic() - last_s,
                    )
                    return
                last_s = time.monotonic()

    async def _end(self, context_id: str, owner: str) -> None:
        with contextlib.suppress(StoreError):
            await self._store.script(scripts.END_FLIGHT, [keys.flight(context_id)], [owner])

    async def _withdraw(self, context_id: str) -> None:
        with contextlib.suppress(StoreError):
            await self._store.run(lambda client: client.hdel(keys.holders(context_id), self._pool_id))

    async def _heartbeat(self) -> None:
        while True:
            with contextlib.suppress(StoreError):
                await self._store.run(lambda client: client.set(keys.alive(self._pool_id), b"1", px=_HEARTBEAT_MS))
            await asyncio.sleep(_HEARTBEAT_S)
