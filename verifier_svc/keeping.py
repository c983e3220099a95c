"""Keeping contexts: how long, where, pinned or not; what a context's message says of it now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from foveate.context_source import ContextCost, ContextFetch, ContextSource
from foveate.rpc.fetch_proto import fetch_to_proto
from foveate.store.errors import StoreError
from foveate.v1 import contexts_pb2, records_pb2
from verifier_svc.cold.costs import CostModel
from verifier_svc.cold.tier import Stored
from verifier_svc.contexts import ContextStore, HeldContext, cold_unreachable, not_held
from verifier_svc.publishing import context_of
from verifier_svc.redis_side import RedisSide

logger = logging.getLogger(__name__)

_SWEEP_S = 5.0
_TOUCH_COLD_S = 60.0  # a context in use is kept alive in the cold tier that often


class ContextKeeper:
    """Frees contexts that nobody uses any more, keeps cold copies alive while somebody does."""

    def __init__(self, contexts: ContextStore, redis: RedisSide | None, *, ttl_s: float) -> None:
        self._contexts = contexts
        self._redis = redis
        self._ttl_s = ttl_s
        self._costs = CostModel() if redis is None else redis.cold.costs
        self._touched_cold_s: dict[str, float] = {}
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to sweep."""
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Ends the sweeping."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    def message(self, held: HeldContext) -> contexts_pb2.Context:
        """Returns a context in the pool as it is now."""
        context = context_of(held)
        context.kv_bytes = held.facts.kv_bytes
        context.state = contexts_pb2.CONTEXT_STATE_READY
        context.num_hits = held.num_hits
        context.pinned = held.is_pinned
        context.lossy = held.is_lossy
        context.fetch.CopyFrom(fetch_to_proto(held.fetch))
        tiers = {ContextSource.POOL: held.facts.kv_bytes, **held.cold_bytes}
        for tier, num_bytes in sorted(tiers.items()):
            context.tiers.add(tier=contexts_pb2.ContextSource.ValueType(tier), num_bytes=num_bytes)
        if not held.is_pinned:
            idle_s = time.monotonic() - held.last_used_s
            context.expire_time.FromNanoseconds(time.time_ns() + int((self._ttl_s - idle_s) * 1e9))
        return context

    def fetch_of_hit(self, held: HeldContext) -> ContextFetch:
        """Returns what an answer on a context in the pool says: it cost nothing, and what the other ways would have."""
        sizes = {ContextSource.POOL: 0, ContextSource.MEDIA: held.facts.media_bytes, **held.cold_bytes}
        costs: tuple[ContextCost, ...] = self._costs.rank(sizes, held.facts.timings)
        return ContextFetch(ContextSource.POOL, 0.0, costs)

    async def release(self, context_id: str, tenant: str) -> None:
        """Frees a context and deletes its cold copies. Raises NotFound when there was neither."""
        held = self._contexts.get(context_id)
        was_held = held is not None and held.facts.tenant == tenant
        if was_held:
            self._contexts.release(context_id)
        if held is not None and not was_held:
            raise not_held(context_id)
        if not await self._delete_cold(context_id, tenant) and not was_held:
            raise not_held(context_id)

    async def touch(self, context_id: str, tenant: str, *, pinned: bool | None) -> contexts_pb2.Context:
        """Puts a context's expiry off in both tiers, and pins or unpins it. Raises NotFound, Unavailable."""
        held = self._contexts.get(context_id)
        if held is None:
            return await self._touch_cold_only(context_id, tenant, pinned=pinned)
        if held.facts.tenant != tenant:
            raise not_held(context_id)
        if pinned is not None:
            held.is_pinned = pinned
        await self._touch_cold(held)
        return self.message(held)

    async def listed(self, tenant: str, *, include_cold: bool, context_id: str | None) -> list[contexts_pb2.Context]:
        """Returns a tenant's contexts, newest first; one that only the cold tier has is COLD.

        Raises Unavailable when one is named that is not in the pool, and the cold tier does not answer.
        """
        held = [one for one in self._contexts.newest_first() if one.facts.tenant == tenant]
        found = {one.facts.context_id: self.message(one) for one in held}
        if context_id is not None:
            found = {key: message for key, message in found.items() if key == context_id}
        if self._redis is not None and include_cold and (context_id is None or not found):
            try:
                found |= {key: one for key, one in (await self._cold(tenant, context_id)).items() if key not in found}
            except StoreError as error:
                if context_id is not None:
                    raise cold_unreachable(context_id) from error
        return sorted(found.values(), key=lambda one: one.create_time.ToNanoseconds(), reverse=True)

    async def _cold(self, tenant: str, context_id: str | None) -> dict[str, contexts_pb2.Context]:
        assert self._redis is not None
        if context_id is None:
            records = await self._redis.directory.records(tenant)
        else:
            one = await self._redis.directory.record(context_id, tenant)
            records = [] if one is None else [one]
        stored = await self._redis.cold.inventory() if records else {}
        return {
            record.context_id: _cold_message(record, stored[record.context_id], self._redis.cold.ttl_s)
            for record in records
            if record.context_id in stored
        }

    async def _touch_cold_only(self, context_id: str, tenant: str, *, pinned: bool | None) -> contexts_pb2.Context:
        if self._redis is None:
            raise not_held(context_id)
        directory, cold = self._redis.directory, self._redis.cold
        try:
            record = await directory.record(context_id, tenant)
            if record is None or not await cold.find(context_id, tenant):
                raise not_held(context_id)
            is_pinned = record.pinned if pinned is None else pinned
            await cold.touch(context_id, is_pinned=is_pinned)
            await directory.write_record(record.context, tenant, is_pinned=is_pinned)
            return (await self._cold(tenant, context_id))[context_id]
        except (StoreError, KeyError) as error:
            raise cold_unreachable(context_id) from error

    async def _delete_cold(self, context_id: str, tenant: str) -> bool:
        if self._redis is None:
            return False
        try:
            if not await self._redis.cold.find(context_id, tenant):
                return False
            await self._redis.directory.forget(context_id, tenant)
            return await self._redis.cold.delete(context_id)
        except StoreError as error:
            logger.warning("the cold copies of %s could not be deleted; they expire: %s", context_id, error)
            return False

    async def _touch_cold(self, held: HeldContext) -> None:
        self._touched_cold_s[held.facts.context_id] = time.monotonic()
        if self._redis is None:
            return
        with contextlib.suppress(StoreError):
            await self._redis.cold.touch(held.facts.context_id, is_pinned=held.is_pinned)
            context, tenant, token = context_of(held), held.facts.tenant, held.fencing_token
            if held.is_lossy:  # nobody who has the video is sent here
                await self._redis.directory.write_record(context, tenant, is_pinned=held.is_pinned)
            else:
                await self._redis.directory.announce(context, tenant, token, is_pinned=held.is_pinned)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._contexts.expire_idle(self._ttl_s)
            held = {one.facts.context_id: one for one in self._contexts.newest_first()}
            self._touched_cold_s = {key: at_s for key, at_s in self._touched_cold_s.items() if key in held}
            limit_s = time.monotonic() - _TOUCH_COLD_S
            for context_id, one in held.items():
                touched_s = self._touched_cold_s.setdefault(context_id, time.monotonic())
                if self._redis is not None and touched_s < limit_s and one.last_used_s > touched_s:
                    await self._touch_cold(one)


def _cold_message(record: records_pb2.ContextRecord, stored: Stored, ttl_s: float) -> contexts_pb2.Context:
    context = contexts_pb2.Context()
    context.CopyFrom(record.context)
    context.kv_bytes = 0
    context.state = contexts_pb2.CONTEXT_STATE_COLD
    context.pinned = record.pinned
    for tier, num_bytes in sorted(stored.num_bytes.items()):
        context.tiers.add(tier=contexts_pb2.ContextSource.ValueType(tier), num_bytes=num_bytes)
    if stored.used_s != float("inf"):
        context.expire_time.FromNanoseconds(int((stored.used_s + ttl_s) * 1e9))
    return context
