"""Taking KV memory: slabs belong to a lease from the moment they exist; idle contexts make room when it is short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import torch

from engine.device_thread import DeviceThread
from engine.kv_pool import AnySlab, KvPool, PoolFull, SelectionSlab, Slab, TensorSlab
from foveate.rpc.errors import ResourceExhausted
from verifier_svc.contexts import ContextStore
from verifier_svc.threads import ParkedThreads

SlabT = TypeVar("SlabT", Slab, SelectionSlab, TensorSlab)


class SlabLease:
    """The slabs of one piece of work. Every call runs on the device thread, so a cancelled caller loses nothing:

    a slab is on the lease before its taker hears of it, and `free_all`, queued later, finds it.
    """

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._slabs: list[AnySlab] = []

    def take(self, capacity: int) -> Slab:
        """Allocates room for `capacity` tokens; raises PoolFull."""
        return self._keep(self._pool.allocate(capacity))

    def take_selection(self, num_selected: int) -> SelectionSlab:
        """Allocates room for a selection; raises PoolFull."""
        return self._keep(self._pool.allocate_selection(num_selected))

    def take_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSlab:
        """Allocates room for a tensor; raises PoolFull."""
        return self._keep(self._pool.allocate_tensor(shape, dtype))

    def hand_over(self, slab: AnySlab) -> None:
        """Takes `slab` off the lease: somebody else frees it."""
        self._slabs.remove(slab)

    def free_all(self) -> None:
        """Frees what is still on the lease."""
        while self._slabs:
            self._pool.free(self._slabs.pop())

    def _keep(self, slab: SlabT) -> SlabT:
        self._slabs.append(slab)
        return slab


class Memory:
    """Allocation for leases, one at a time; parked threads, then idle contexts make room."""

    def __init__(
        self, pool: KvPool, device: DeviceThread, contexts: ContextStore, threads: ParkedThreads | None = None
    ) -> None:
        self._pool = pool
        self._device = device
        self._contexts = contexts
        self._threads = threads or ParkedThreads(free=lambda slab: None)
        self._lock = asyncio.Lock()

    def refuse_if_too_large(self, capacity: int) -> None:
        """Raises RESOURCE_EXHAUSTED when not even an empty pool has room for `capacity` tokens."""
        needed = self._pool.layout.slab_bytes(capacity)
        if needed > self._pool.pool_bytes:
            raise _exhausted(PoolFull(needed_bytes=needed, free_bytes=0, total_bytes=self._pool.pool_bytes))

    async def take(self, lease: SlabLease, capacity: int) -> Slab:
        """Takes room for `capacity` tokens; RESOURCE_EXHAUSTED names need and limit."""
        return await self._take(lambda: lease.take(capacity))

    async def take_selection(self, lease: SlabLease, num_selected: int) -> SelectionSlab:
        """Takes room for a selection; RESOURCE_EXHAUSTED names need and limit."""
        return await self._take(lambda: lease.take_selection(num_selected))

    async def take_tensor(self, lease: SlabLease, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSlab:
        """Takes room for a tensor; RESOURCE_EXHAUSTED names need and limit."""
        return await self._take(lambda: lease.take_tensor(shape, dtype))

    async def _take(self, allocate: Callable[[], SlabT]) -> SlabT:
        async with self._lock:
            while True:
                try:
                    return await self._device.run(allocate)
                except PoolFull as error:
                    evictable = self._contexts.idle_bytes() + self._threads.num_bytes
                    can_help = error.needed_bytes <= error.free_bytes + evictable
                    if not (can_help and (self._threads.evict() or self._contexts.evict_idle())):
                        raise _exhausted(error) from error


def _exhausted(error: PoolFull) -> ResourceExhausted:
    may_pass = error.needed_bytes <= error.total_bytes
    free = f"{error.free_bytes} of {error.total_bytes} are free"
    return ResourceExhausted(
        f"the KV pool has no room: {error.needed_bytes} bytes are needed, {free}",
        reason="POOL_FULL",
        metadata={
            "needed_bytes": str(error.needed_bytes),
            "free_bytes": str(error.free_bytes),
            "limit_bytes": str(error.total_bytes),
        },
        retry_after_s=1.0 if may_pass else None,
    )
