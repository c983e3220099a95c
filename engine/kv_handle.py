"""Names of KV memory: plain values that cross processes, never memory itself."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from engine.layout import DTYPES, KvLayout

SHM_DIR = "/dev/shm"
SEGMENT_PREFIX = "foveate-"
# foveate-<first 8 hex of the boot id>-<pid>-<random>
SEGMENT_NAME = re.compile(r"foveate-[0-9a-f]{8}-[0-9]{1,10}-[0-9a-f]{16}")
CUDA_MEM_HANDLE_BYTES = 64


@dataclass(frozen=True)
class Slab:
    """Room for `capacity` tokens of keys and values, `offset_bytes` from the start of the pool."""

    offset_bytes: int
    capacity: int


@dataclass(frozen=True)
class SelectionSlab:
    """Indices of `num_selected` visual entries per layer and KV head, `offset_bytes` from the start of the pool."""

    offset_bytes: int
    num_selected: int


@dataclass(frozen=True)
class TensorSlab:
    """Room for a tensor that belongs to a context beside its KV, `offset_bytes` from the start of the pool.

    `dtype` is a name of `engine.layout.DTYPES`.
    """

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class ShmSegment:
    """A file below /dev/shm; `namespace_id` says which /dev/shm."""

    path: str
    namespace_id: str


@dataclass(frozen=True)
class CudaIpcSegment:
    """A cudaMalloc block exported whole; the pool starts `base_offset_bytes` inside it."""

    device_uuid: str
    mem_handle: bytes
    base_offset_bytes: int


@dataclass(frozen=True)
class PoolHandle:
    """Everything another process needs to map a pool; mirrors foveate.v1.KvHandle."""

    pool_id: str
    epoch: int
    pool_bytes: int
    segment: ShmSegment | CudaIpcSegment
    layout: KvLayout
    model_fingerprint: str
