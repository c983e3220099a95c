"""The owner's side of KV memory: one allocation, made once, exported once, in which slabs come and go.

    who            may write                     may read      must free
    owner (here)   header, every slab            everything    every slab it allocated; the pool on close
    readers        nothing                       a slab named  nothing; they drop their mapping when the
                                                 to them       epoch changes or the owner dies

An owner frees a slab only when no reader's answer uses it any more; the pool itself cannot know.
"""

from __future__ import annotations

import os
import secrets

import torch
from torch import Tensor

from engine import shm
from engine.free_list import FreeList, PoolFull
from engine.kv_handle import CudaIpcSegment, PoolHandle, SelectionSlab, ShmSegment, Slab, TensorSlab
from engine.kv_memory import HEADER_BYTES, PAGE_BYTES, Header, selection_view, slab_region, slab_views, tensor_view
from engine.layout import KvLayout, dtype_name

__all__ = ["AnySlab", "KvPool", "PoolFull", "PoolHandle", "SelectionSlab", "Slab", "TensorSlab"]

AnySlab = Slab | SelectionSlab | TensorSlab


class KvPool:
    """A pool of KV slabs in POSIX shared memory or CUDA memory. Not thread-safe: the device thread owns it."""

    def __init__(self, memory: Tensor, handle: PoolHandle, owned: shm.OwnedSegment | None) -> None:
        self._memory = memory  # uint8 [pool_bytes]
        self._owned = owned
        self._ranges = FreeList(PAGE_BYTES, handle.pool_bytes, align_bytes=PAGE_BYTES)
        self.handle = handle
        header = Header(handle.epoch, os.getpid(), handle.layout.digest(handle.model_fingerprint)).pack()
        self._memory[:HEADER_BYTES] = _as_tensor(header).to(memory.device)
        self._synchronize()

    @classmethod
    def create(cls, layout: KvLayout, *, pool_bytes: int, device: torch.device, model_fingerprint: str) -> KvPool:
        """Makes the pool and removes segments that dead owners left.

        Raises OSError when shared memory has no room (its text names need and free space), RuntimeError when CUDA
        memory cannot be exported, ValueError when `pool_bytes` has no room for a slab.
        """
        if pool_bytes < 2 * PAGE_BYTES:
            raise ValueError(f"pool_bytes must be at least {2 * PAGE_BYTES}, not {pool_bytes}")
        owned: shm.OwnedSegment | None = None
        segment: ShmSegment | CudaIpcSegment
        if device.type == "cpu":
            shm.sweep_stale_segments()
            owned = shm.OwnedSegment(pool_bytes)
            memory, segment = owned.memory, ShmSegment(owned.path, shm.shm_namespace_id())
        else:
            from engine import cuda_ipc

            memory, segment = cuda_ipc.allocate_exported(pool_bytes, device)
        epoch = secrets.randbits(63) | 1
        handle = PoolHandle(secrets.token_hex(8), epoch, pool_bytes, segment, layout, model_fingerprint)
        return cls(memory, handle, owned)

    def allocate(self, capacity: int) -> Slab:
        """Takes a slab for `capacity` tokens (at least one); its rows read zeros. Raises PoolFull."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        return Slab(self._take(self.handle.layout.slab_bytes(capacity)), capacity)

    def allocate_selection(self, num_selected: int) -> SelectionSlab:
        """Takes room for the indices of `num_selected` entries per layer and KV head. Raises PoolFull."""
        return SelectionSlab(self._take(self.handle.layout.selection_bytes(num_selected)), num_selected)

    def allocate_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSlab:
        """Takes room for a tensor of at least one element; it reads zeros. Raises PoolFull."""
        wanted = TensorSlab(0, shape, dtype_name(dtype))
        return TensorSlab(self._take(wanted.num_bytes), shape, wanted.dtype)

    def free(self, slab: AnySlab) -> None:
        """Gives a slab back; ValueError when it is not taken (a double free is a bug of the caller)."""
        self._ranges.release(slab.offset_bytes)

    def views(self, slab: Slab) -> tuple[Tensor, Tensor]:
        """Returns keys and values of `slab`, each [num_layers, num_kv_heads, capacity, head_dim]."""
        return slab_views(self._memory, self.handle.layout, slab)

    def region(self, slab: Slab) -> Tensor:
        """Returns all bytes of `slab`, uint8 [slab bytes]: keys and values as `views` shows them, in that order."""
        return slab_region(self._memory, self.handle.layout, slab)

    def selection_view(self, slab: SelectionSlab) -> Tensor:
        """Returns the indices of `slab`, int32 [num_layers, num_kv_heads, num_selected]."""
        return selection_view(self._memory, self.handle.layout, slab)

    def tensor_view(self, slab: TensorSlab) -> Tensor:
        """Returns the tensor of `slab`."""
        return tensor_view(self._memory, slab)

    @property
    def layout(self) -> KvLayout:
        """Shape of a row."""
        return self.handle.layout

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool, header page included."""
        return self.handle.pool_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in taken slabs, alignment included."""
        return self._ranges.used_bytes

    @property
    def num_slabs(self) -> int:
        """Number of taken slabs, selections included."""
        return self._ranges.num_taken

    def check_integrity(self) -> None:
        """Asserts that taken and free bytes tile the pool without overlap."""
        self._ranges.check_integrity()

    def close(self) -> None:
        """Clears the header, so that readers notice, and removes the segment. May be called twice."""
        self._memory[:HEADER_BYTES].zero_()
        self._synchronize()
        if self._owned is not None:
            self._owned.unlink()

    def _take(self, num_bytes: int) -> int:
        offset = self._ranges.allocate(num_bytes)
        self._memory[offset : offset + self._ranges.taken_bytes(offset)].zero_()
        return offset

    def _synchronize(self) -> None:
        if self._memory.device.type == "cuda":
            torch.cuda.synchronize(self._memory.device)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
