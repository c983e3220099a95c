"""The reader's side of KV memory: a verifier's pool, mapped read-only, checked before it is believed."""

from __future__ import annotations

import torch
from torch import Tensor

from engine import shm
from engine.kv_handle import PoolHandle, SelectionSlab, ShmSegment, Slab, TensorSlab
from engine.kv_memory import (
    HEADER_BYTES,
    Header,
    KvNotShared,
    KvStale,
    read_header,
    selection_view,
    slab_views,
    tensor_view,
)
from engine.shm import shm_namespace_id

__all__ = ["KvNotShared", "KvStale", "MappedPool", "shm_namespace_id"]


class MappedPool:
    """Another process's KV pool. Views stay readable after `close`; only their content may no longer be the pool's."""

    def __init__(self, handle: PoolHandle, memory: Tensor, mapped: shm.MappedSegment | None) -> None:
        self.handle = handle
        self._memory = memory  # uint8 [pool_bytes]
        self._mapped = mapped

    @classmethod
    def attach(cls, handle: PoolHandle, *, device: torch.device) -> MappedPool:
        """Maps the pool. Raises KvNotShared when it cannot be reached from here, KvStale when it is no longer there."""
        mapped: shm.MappedSegment | None = None
        if isinstance(handle.segment, ShmSegment):
            if device.type != "cpu":
                raise KvNotShared(f"a pool in shared memory cannot be read from {device.type}")
            mapped = shm.MappedSegment(handle.segment, handle.pool_bytes)
            memory = mapped.memory
        else:
            from engine import cuda_ipc

            memory = cuda_ipc.open_exported(handle.segment, handle.pool_bytes, device)
        pool = cls(handle, memory, mapped)
        try:
            pool.check()
        except BaseException:
            pool.close()
            raise
        return pool

    def views(self, slab: Slab) -> tuple[Tensor, Tensor]:
        """Returns keys and values, each [num_layers, num_kv_heads, capacity, head_dim]; ValueError outside."""
        return slab_views(self._memory, self.handle.layout, slab)

    def selection_view(self, slab: SelectionSlab) -> Tensor:
        """Returns the indices of `slab`, int32 [num_layers, num_kv_heads, num_selected]; ValueError outside."""
        return selection_view(self._memory, self.handle.layout, slab)

    def tensor_view(self, slab: TensorSlab) -> Tensor:
        """Returns the tensor of `slab`; ValueError outside."""
        return tensor_view(self._memory, slab)

    def check(self) -> None:
        """Raises KvStale unless the owner lives and the header is the one of the handle."""
        header = self._header()
        if header.epoch != self.handle.epoch:
            raise KvStale(f"the pool's epoch is {header.epoch}, not {self.handle.epoch}")
        if header.layout_digest != self.handle.layout.digest(self.handle.model_fingerprint):
            raise KvStale("the pool holds another model's KV")
        if self._mapped is not None and not self._mapped.owner_is_alive():
            raise KvStale("the process that owned the pool is gone")

    def close(self) -> None:
        """Drops the mapping; the memory goes with the last view."""
        if self._mapped is not None:
            self._mapped.close()
        self._memory = self._memory[:0]

    def _header(self) -> Header:
        if self._memory.numel() < HEADER_BYTES:
            raise KvStale("the mapping was closed")
        return read_header(bytes(self._memory[:HEADER_BYTES].cpu().numpy()))
