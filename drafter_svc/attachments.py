"""Verifiers' pools as this process sees them: each mapped once, dropped when it is stale.

A mapping is shared by all sequences of its pool. Dropping it never takes memory from under a sequence: views keep it
alive.
"""

from __future__ import annotations

import torch

from engine.kv_handle import PoolHandle
from engine.kv_share import KvStale, MappedPool


class Attachments:
    """Mapped pools by handle. Not thread-safe: the device thread owns it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[PoolHandle, MappedPool] = {}

    def get(self, handle: PoolHandle) -> MappedPool:
        """Returns the pool, mapped and checked; raises KvNotShared or KvStale when it cannot be read."""
        pool = self._pools.get(handle)
        if pool is None:
            self.drop_stale()
            pool = self._pools[handle] = MappedPool.attach(handle, device=self._device)
        pool.check()
        return pool

    def drop_stale(self) -> None:
        """Drops the pools whose owners are gone."""
        for handle, pool in list(self._pools.items()):
            try:
                pool.check()
            except KvStale:
                del self._pools[handle]
                pool.close()

    def close(self) -> None:
        """Drops all."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def __len__(self) -> int:
        return len(self._pools)
