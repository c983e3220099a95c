"""Shape and size of one token's keys and values: the arithmetic every user of KV memory shares."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name used in flags, handles and fingerprints; ValueError for a dtype no KV is kept in."""
    for name, known in DTYPES.items():
        if known is dtype:
            return name
    raise ValueError(f"dtype {dtype} is not one of {', '.join(DTYPES)}")


@dataclass(frozen=True)
class KvLayout:
    """What a row of KV looks like. A slab is [2 (keys, values), num_layers, num_kv_heads, capacity, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def slab_bytes(self, capacity: int) -> int:
        """Bytes of a slab with room for `capacity` tokens."""
        return self.bytes_per_token * capacity

    def selection_bytes(self, num_selected: int) -> int:
        """Bytes of int32 indices for `num_selected` entries per layer and KV head."""
        return self.num_layers * self.num_kv_heads * num_selected * 4

    def digest(self, model_fingerprint: str) -> bytes:
        """Returns 32 bytes that differ when layout or model differ; written into the pool's header."""
        parts = (self.num_layers, self.num_kv_heads, self.head_dim, dtype_name(self.dtype), model_fingerprint)
        return hashlib.sha256("|".join(map(str, parts)).encode()).digest()
