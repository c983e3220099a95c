"""The bytes of a pool, as owner and reader both see them: a header page, then slabs.

    offset 0       header page: magic, version, epoch, owner pid, layout digest      written by the owner only
    offset 4096    slabs, each aligned to 4096 bytes                                 owner writes, readers read

A reader trusts a mapping only while the header carries the magic and the epoch of the handle it mapped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_handle import SelectionSlab, Slab, TensorSlab
from engine.layout import DTYPES, KvLayout

PAGE_BYTES = 4096
MAGIC = b"FOVEAKV\0"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQ32s")  # magic, version, reserved, epoch, owner pid, layout digest
HEADER_BYTES = _HEADER.size


class KvStale(Exception):
    """The pool behind a mapping is gone or is another one; map again from a fresh handle."""


class KvNotShared(Exception):
    """The pool's memory cannot be reached from this process."""


@dataclass(frozen=True)
class Header:
    """The first bytes of a pool."""

    epoch: int
    owner_pid: int
    layout_digest: bytes

    def pack(self) -> bytes:
        """Returns the header as little-endian bytes."""
        return _HEADER.pack(MAGIC, VERSION, 0, self.epoch, self.owner_pid, self.layout_digest)


def read_header(data: bytes) -> Header:
    """Parses the first HEADER_BYTES of a pool; raises KvStale when no live pool is there."""
    magic, version, _, epoch, owner_pid, digest = _HEADER.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise KvStale("the KV pool was closed by its owner")
    return Header(epoch, owner_pid, digest)


def slab_views(memory: Tensor, layout: KvLayout, slab: Slab) -> tuple[Tensor, Tensor]:
    """Returns keys and values, each [num_layers, num_kv_heads, capacity, head_dim], as views of `memory` (uint8).

    Raises ValueError when the slab does not lie inside the pool: slabs may come from another process.
    """
    region = slab_region(memory, layout, slab)
    shape = (2, layout.num_layers, layout.num_kv_heads, slab.capacity, layout.head_dim)
    both = region.view(layout.dtype).view(shape)
    return both[0], both[1]


def slab_region(memory: Tensor, layout: KvLayout, slab: Slab) -> Tensor:
    """Returns the bytes of a slab, uint8 [slab bytes], as a view of `memory`; ValueError as above."""
    return _region(memory, slab.offset_bytes, layout.slab_bytes(slab.capacity))


def selection_view(memory: Tensor, layout: KvLayout, slab: SelectionSlab) -> Tensor:
    """Returns the indices, int32 [num_layers, num_kv_heads, num_selected], as a view; ValueError as above."""
    if slab.num_selected == 0:  # takes no memory and so lies nowhere
        return torch.empty(layout.num_layers, layout.num_kv_heads, 0, dtype=torch.int32, device=memory.device)
    region = _region(memory, slab.offset_bytes, layout.selection_bytes(slab.num_selected))
    return region.view(torch.int32).view(layout.num_layers, layout.num_kv_heads, slab.num_selected)


def tensor_view(memory: Tensor, slab: TensorSlab) -> Tensor:
    """Returns the tensor of `slab`, as a view; ValueError as above."""
    return _region(memory, slab.offset_bytes, slab.num_bytes).view(DTYPES[slab.dtype]).view(slab.shape)


def _region(memory: Tensor, offset_bytes: int, num_bytes: int) -> Tensor:
    if offset_bytes < PAGE_BYTES or offset_bytes % PAGE_BYTES or offset_bytes + num_bytes > memory.numel():
        raise ValueError(
            f"slab of {num_bytes} bytes at {offset_bytes} does not lie page-aligned inside a pool of {memory.numel()}"
        )
    return memory[offset_bytes : offset_bytes + num_bytes]
