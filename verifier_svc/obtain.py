"""Coming by a context the cheapest way: read its keys and values, prefill its embeddings, or prefill its video.

    make         somebody sent the video: under a flight, so that all verifiers together make it once
    bring_back   somebody asks about a context that is not in the pool: from whatever the cold tier has of it

Every way ends in a slab that belongs to the context store. A way that fails (a copy is gone, damaged, or too slow to
read) leaves nothing behind, is counted, and the next cheapest is tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.device_thread import DeviceThread
from engine.frames import Grid
from engine.kv_pool import Slab, TensorSlab
from foveate.context_source import ContextCost, ContextFetch, ContextSource
from foveate.store.errors import Corrupt, Missing, StoreError, Unreachable
from verifier_svc.cold.forms import Copy, bytes_of
from verifier_svc.cold.int8 import from_int8
from verifier_svc.contexts import ContextFacts, ContextStore, HeldContext, cold_unreachable, not_held
from verifier_svc.directory import Elsewhere
from verifier_svc.engine_parts import EngineParts
from verifier_svc.media import Media, spooled
from verifier_svc.memory import Memory, SlabLease
from verifier_svc.prefill import PATCHES, ContextIdentity, EncodedVideo, Prefiller, whole_pages
from verifier_svc.progress import ProgressBoard
from verifier_svc.publishing import Publishing
from verifier_svc.redis_side import RedisSide

KV, FEATURES, MEDIA = "kv", "visual_features", "media"
INTEGERS, SCALES = "kv_int8", "kv_scales"


@dataclass(frozen=True)
class _Order:
    """A context that is wanted, and what there is to make it from."""

    identity: ContextIdentity
    board: ProgressBoard
    media: Media | None = None
    copies: Mapping[ContextSource, Copy] = field(default_factory=dict)
    is_pinned: bool = False
    token: int = 0


@dataclass(frozen=True)
class _Made:
    """A context in a slab that is on a lease, and what its maker can publish of it."""

    facts: ContextFacts
    slab: Slab
    tensors: Mapping[str, TensorSlab]
    publishing: Publishing


class Obtainer:
    """Makes contexts and brings them back; `redis` is None without Redis."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        device: DeviceThread,
        contexts: ContextStore,
        memory: Memory,
        prefiller: Prefiller,
        redis: RedisSide | None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._parts = parts
        self._device = device
        self._contexts = contexts
        self._memory = memory
        self._prefiller = prefiller
        self._redis = redis

    async def make(
        self, media: Media, identity: ContextIdentity, usable: Collection[str], board: ProgressBoard
    ) -> HeldContext | Elsewhere:
        """Returns the context of a video that is at hand, or where another of the `usable` verifiers holds it."""
        order = _Order(identity, board, media)
        if self._redis is None:
            return await self._make(order)
        async with self._redis.directory.flight(identity.context_id, identity.tenant, usable) as found:
            if isinstance(found, Elsewhere):
                return found
            with contextlib.suppress(StoreError):
                copies = await self._redis.cold.find(identity.context_id, identity.tenant)
                copies.pop(ContextSource.COLD_KV_INT8, None)  # the video is at hand: what is made of it is exact
                order = replace(order, copies=copies)
            return await self._make(replace(order, token=found))

    async def bring_back(self, context_id: str, tenant: str, board: ProgressBoard) -> HeldContext:
        """Returns a context from the cold tier.

        Raises NotFound when there is nothing left of it, Unavailable when the cold tier does not answer.
        """
        if self._redis is None:
            raise not_held(context_id)
        try:
            copies = await self._redis.cold.find(context_id, tenant)
            record = await self._redis.directory.record(context_id, tenant) if copies else None
        except StoreError as error:
            raise cold_unreachable(context_id) from error
        if not copies:
            self.counters["cold_missed"] += 1
            raise not_held(context_id)
        is_pinned = record is not None and record.pinned
        order = _Order(_identity_of(copies, context_id, tenant), board, None, copies, is_pinned)
        async with self._redis.directory.flight(context_id, tenant, ()) as token:
            assert not isinstance(token, Elsewhere), "no other verifier was named"
            held = await self._cheapest(replace(order, token=token))
        if held is None:
            raise not_held(context_id)
        return held

    async def _make(self, order: _Order) -> HeldContext:
        held = await self._cheapest(order)
        assert held is not None, "a video at hand is a way that raises or works"
        return held

    async def _cheapest(self, order: _Order) -> HeldContext | None:
        unreachable: Exception | None = None
        costs = self._rank(order)
        for cost in costs:
            began_s = time.perf_counter()
            lease = SlabLease(self._parts.pool)
            try:
                made = await self._by(cost.source, order, lease)
                fetch = ContextFetch(cost.source, (time.perf_counter() - began_s) * 1e3, costs)
                # No step of ours is queued any more, and no await lies between these lines: the slab always has one
                # owner.
                held = self._contexts.add(made.facts, made.slab, made.tensors, fetch=fetch)
                for taken in held.slabs:
                    lease.hand_over(taken)
            except StoreError as error:
                if isinstance(error, Unreachable):
                    unreachable = error
                continue
            finally:
                self._device.submit(lease.free_all)
            await self._settle_in(held, order, made)
            return held
        if unreachable is not None:
            raise cold_unreachable(order.identity.context_id) from unreachable
        return None

    async def _settle_in(self, held: HeldContext, order: _Order, made: _Made) -> None:
        self.counters[_COUNTERS[held.fetch.source, order.media is not None]] += 1
        held.is_pinned = order.is_pinned
        held.cold_bytes.update({form: copy.num_bytes for form, copy in order.copies.items()})
        if self._redis is not None:
            await self._redis.publisher.announce(held, order.token, made.publishing)

    def _rank(self, order: _Order) -> tuple[ContextCost, ...]:
        if self._redis is None:
            return (ContextCost(ContextSource.MEDIA, 0.0),)
        sizes = {form: copy.num_bytes for form, copy in order.copies.items()}
        if order.media is not None:
            sizes[ContextSource.MEDIA] = 0  # it is here already
        timings = next((copy.facts.timings for copy in order.copies.values()), None)
        return self._redis.cold.costs.rank(sizes, timings)

    async def _by(self, source: ContextSource, order: _Order, lease: SlabLease) -> _Made:
        """Makes the context in one way, in a slab that stays on `lease`."""
        match source:
            case ContextSource.COLD_KV:
                return await self._restore(order.copies[source], lease)
            case ContextSource.COLD_KV_INT8:
                return await self._restore_int8(order.copies[source], lease)
            case ContextSource.COLD_EMBEDDINGS:
                encoded, media = await self._embeddings(order.copies[source]), None
            case _:
                encoded, media = await self._encode(order)
        made = await self._prefiller.prefill_text(encoded, order.identity, lease, order.board)
        if self._redis is not None and order.copies:
            recorded = next(iter(order.copies.values())).facts.timings
            self._redis.cold.costs.saw_prefill(made.facts.timings.prefill_ms, recorded.prefill_ms)
        return _Made(made.facts, made.slab, made.tensors, Publishing(encoded, media))

    async def _encode(self, order: _Order) -> tuple[EncodedVideo, bytes | None]:
        """Returns a video's embeddings, and the file when it is to be kept in the cold tier."""
        media, identity = order.media, order.identity
        if media is not None:
            encoded = await self._prefiller.encode(media, identity.sampling, order.board)
            return encoded, None if self._redis is None else await self._redis.publisher.media_at_hand(media)
        media = await self._fetch_media(order.copies[ContextSource.MEDIA], identity)
        try:
            return await self._prefiller.encode(media, identity.sampling, order.board), None
        finally:
            media.close()

    async def _restore(self, copy: Copy, lease: SlabLease) -> _Made:
        assert self._redis is not None, "a copy was found in Redis"
        parts, arrays = self._parts, copy.arrays
        layout, num_tokens = parts.pool.layout, copy.facts.num_tokens
        shape = (2, layout.num_layers, layout.num_kv_heads, num_tokens, layout.head_dim)
        if arrays.get(KV) != (layout.dtype, shape):
            raise Corrupt("a cold copy's keys and values do not fit this model")
        if not self._prefiller.tensor_names <= arrays.keys():
            raise Missing("a cold copy lacks what this verifier keeps beside keys and values")
        slab = await self._memory.take(lease, num_tokens)
        tensors = await self._tensors(copy, lease, beside=(KV,))
        await self._read(copy, {KV: parts.pool.region(slab), **self._places(tensors)})
        return self._restored(copy, slab, tensors)

    async def _restore_int8(self, copy: Copy, lease: SlabLease) -> _Made:
        parts, arrays = self._parts, copy.arrays
        layout, num_tokens = parts.pool.layout, copy.facts.num_tokens
        shape = (2, layout.num_layers, layout.num_kv_heads, num_tokens, layout.head_dim)
        of_scales = (torch.float32, (*shape[:-1], 1))
        if arrays.get(INTEGERS) != (torch.int8, shape) or arrays.get(SCALES) != of_scales:
            raise Corrupt("a cold copy's keys and values do not fit this model")
        if not self._prefiller.tensor_names <= arrays.keys():
            raise Missing("a cold copy lacks what this verifier keeps beside keys and values")
        slab = await self._memory.take(lease, num_tokens)
        tensors = await self._tensors(copy, lease, beside=(INTEGERS, SCALES))
        device = parts.loaded.device
        integers = torch.empty(shape, dtype=torch.int8, device=device)
        scales = torch.empty(of_scales[1], dtype=torch.float32, device=device)
        staged = {INTEGERS: integers.flatten().view(torch.uint8), SCALES: scales.flatten().view(torch.uint8)}
        await self._read(copy, {**staged, **self._places(tensors)})
        await self._device.run(from_int8, integers, scales, parts.pool.region(slab).view(layout.dtype).view(shape))
        return self._restored(copy, slab, tensors)

    async def _tensors(self, copy: Copy, lease: SlabLease, *, beside: Collection[str]) -> dict[str, TensorSlab]:
        """Takes room in the pool for the arrays of a copy that are kept beside keys and values."""
        return {
            name: await self._memory.take_tensor(lease, size, dtype)
            for name, (dtype, size) in copy.arrays.items()
            if name not in beside
        }

    def _places(self, tensors: Mapping[str, TensorSlab]) -> dict[str, Tensor]:
        pool = self._parts.pool
        return {name: pool.tensor_view(one).flatten().view(torch.uint8) for name, one in tensors.items()}

    def _restored(self, copy: Copy, slab: Slab, tensors: Mapping[str, TensorSlab]) -> _Made:
        num_bytes = [self._parts.pool.layout.slab_bytes(slab.capacity), *(one.num_bytes for one in tensors.values())]
        facts = replace(copy.facts, kv_bytes=sum(map(whole_pages, num_bytes)))
        return _Made(facts, slab, tensors, Publishing(None, None))

    async def _read(self, copy: Copy, places: Mapping[str, Tensor]) -> None:
        """Reads the arrays of a copy into the pool: straight into it, or through pinned memory where it is a GPU's."""
        assert self._redis is not None, "a copy was found in Redis"
        is_host = self._parts.loaded.device.type == "cpu"
        staged = {
            name: place if is_host else torch.empty(place.shape, dtype=torch.uint8, pin_memory=True)
            for name, place in places.items()
        }
        await self._redis.cold.restore(copy, {name: bytes_of(one) for name, one in staged.items()})
        for name, place in places.items():
            if not is_host:
                await self._device.run(place.copy_, staged[name])

    async def _embeddings(self, copy: Copy) -> EncodedVideo:
        assert self._redis is not None, "a copy was found in Redis"
        loaded, facts = self._parts.loaded, copy.facts
        dtype, shape = copy.arrays.get(FEATURES, (torch.uint8, ()))
        if dtype != loaded.dtype or len(shape) != 2 or shape[0] != facts.num_visual_tokens:
            raise Corrupt("a cold copy's embeddings do not fit this model")
        if PATCHES in self._prefiller.tensor_names:
            raise Missing("embeddings do not give back the patches that this verifier keeps")
        features = torch.empty(shape, dtype=dtype)
        await self._redis.cold.restore(copy, {FEATURES: bytes_of(features)})
        return EncodedVideo(
            features=await self._device.run(features.to, loaded.device),
            patches=None,
            grid=Grid(*facts.grid),
            video=facts.video,
            decode_ms=facts.timings.decode_ms,
            encode_ms=facts.timings.encode_ms,
        )

    async def _fetch_media(self, copy: Copy, identity: ContextIdentity) -> Media:
        assert self._redis is not None, "a copy was found in Redis"
        _, shape = copy.arrays.get(MEDIA, (torch.uint8, ()))
        data = bytearray(math.prod(shape))
        if not shape or len(data) != identity.media_bytes:
            raise Corrupt("a cold copy's video has another length than its facts say")
        await self._redis.cold.restore(copy, {MEDIA: memoryview(data)})
        media = await asyncio.to_thread(spooled, data)
        media.stored_fps = identity.sampling.stored_fps
        if media.sha256 != identity.media_sha256:
            media.close()
            raise Corrupt("a cold copy's video is another one")
        return media


# By source, and whether the video was at hand.
_COUNTERS = {
    (ContextSource.COLD_KV, True): "restored_kv",
    (ContextSource.COLD_KV, False): "restored_kv",
    (ContextSource.COLD_KV_INT8, False): "restored_kv8",
    (ContextSource.COLD_EMBEDDINGS, True): "restored_embeddings",
    (ContextSource.COLD_EMBEDDINGS, False): "restored_embeddings",
    (ContextSource.MEDIA, True): "prefilled",
    (ContextSource.MEDIA, False): "restored_media",
}


def _identity_of(copies: Mapping[ContextSource, Copy], context_id: str, tenant: str) -> ContextIdentity:
    facts = next(iter(copies.values())).facts
    return ContextIdentity(context_id, tenant, facts.media_sha256, facts.media_bytes, facts.sampling)
