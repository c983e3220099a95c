"""Attention in parts: each part of the keys by itself, merged exactly by log-sum-exp.

A sequence's keys are a context that every row sees, earlier rows of the thread that every row sees, and the new rows,
which are causal. Only the last part needs a mask, so the long ones run on the fastest kernel a device has. The query
heads of a KV group are folded into the rows: a group reads its keys once. Source: FlashAttention-2 (arXiv 2307.08691,
section 3.1.1) for the merge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import AttentionPlan, KvView

# A prompt of more rows than this on an empty thread is one causal call.
LONG_PREFILL_ROWS = 64
# Below this many mask entries one masked call over the thread beats an unmasked call, a masked one and a merge.
_MAX_THREAD_MASK = 1 << 16


class Primitives(Protocol):
    """The two calls a device must have; both return (output, log-sum-exp).

    Query, keys, values and output are [1, num_kv_heads, num_rows, head_dim].
    """

    @property
    def name(self) -> str:
        """Name of the kernel built on them."""

    def unmasked(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Every row sees every key. Log-sum-exp is float32 [1, num_kv_heads, num_rows]."""

    def masked(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As above with `bias` [num_rows, num_keys] added to the scores."""


@dataclass(frozen=True)
class _Part:
    keys: tuple[Tensor, ...]  # per layer [1, num_kv_heads, num_keys, head_dim]
    values: tuple[Tensor, ...]
    bias: Tensor | None


class PartsKernel:
    """An AttentionKernel made of a device's primitives."""

    def __init__(self, primitives: Primitives) -> None:
        self._primitives = primitives

    @property
    def name(self) -> str:
        return self._primitives.name

    def plan(self, kv: KvView, num_new: int, num_rows: int, *, num_heads: int, scaling: float) -> AttentionPlan:
        if num_rows != num_new:
            raise ValueError("kernels in parts take no padding rows")
        if is_long_prefill(kv, num_new):
            return CausalPlan(kv, num_new, scaling)
        return _PartsPlan(self._primitives, _parts(kv, num_new, num_heads), scaling)


def is_long_prefill(kv: KvView, num_new: int) -> bool:
    """Tells whether the new rows see nothing but themselves and are many."""
    return kv.context_len == 0 and kv.thread_len == 0 and num_new > LONG_PREFILL_ROWS


class CausalPlan:
    """A long prompt on an empty thread: one causal call, the same for every kernel."""

    def __init__(self, kv: KvView, num_new: int, scaling: float) -> None:
        self._keys = _layers(kv.thread[0][:, :, :num_new])
        self._values = _layers(kv.thread[1][:, :, :num_new])
        self._scaling = scaling

    def run(self, layer: int, query: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=self._scaling, enable_gqa=query.shape[1] != keys.shape[1]
        )
        return out.transpose(1, 2)


class _PartsPlan:
    def __init__(self, primitives: Primitives, parts: list[_Part], scaling: float) -> None:
        self._primitives, self._parts, self._scaling = primitives, parts, scaling

    def run(self, layer: int, query: Tensor) -> Tensor:
        _, num_heads, num_rows, head_dim = query.shape
        num_kv_heads = self._parts[0].keys[layer].shape[1]
        folded = query.reshape(1, num_kv_heads, num_heads // num_kv_heads * num_rows, head_dim)
        out, lse = self._run_part(self._parts[0], layer, folded)
        for part in self._parts[1:]:
            out, lse = _merge(out, lse, *self._run_part(part, layer, folded))
        return out.reshape(1, num_heads, num_rows, head_dim).transpose(1, 2)

    def _run_part(self, part: _Part, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = part.keys[layer], part.values[layer]
        if part.bias is None:
            return self._primitives.unmasked(query, keys, values, self._scaling)
        return self._primitives.masked(query, keys, values, self._scaling, part.bias)


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    weight_b = torch.sigmoid(lse_b - lse_a).unsqueeze(-1).to(out_a.dtype)
    return torch.lerp(out_a, out_b, weight_b), torch.logaddexp(lse_a, lse_b)


def _parts(kv: KvView, num_new: int, num_heads: int) -> list[_Part]:
    parts = []
    if kv.context is not None and kv.context_len:
        parts.append(_Part(_layers(kv.context[0]), _layers(kv.context[1]), None))
    start, stop = kv.thread_len, kv.thread_len + num_new
    group = num_heads // kv.thread[0].shape[1]
    if num_new == 1:
        return [*parts, _thread_part(kv, 0, stop, None)]
    if start and group * num_new * stop > _MAX_THREAD_MASK:
        parts.append(_thread_part(kv, 0, start, None))
        return [*parts, _thread_part(kv, start, stop, causal_bias(num_new, num_new, group, kv.thread[0]))]
    return [*parts, _thread_part(kv, 0, stop, causal_bias(num_new, stop, group, kv.thread[0]))]


def _thread_part(kv: KvView, start: int, stop: int, bias: Tensor | None) -> _Part:
    keys, values = kv.thread
    return _Part(_layers(keys[:, :, start:stop]), _layers(values[:, :, start:stop]), bias)


def _layers(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.unsqueeze(1).unbind(0)


def causal_bias(num_new: int, num_keys: int, group: int, like: Tensor) -> Tensor:
    """Returns [group * num_new, num_keys]: 0 where a row may look, else -inf; the new rows are the last keys."""
    bias = torch.full((num_new, num_keys), float("-inf"), dtype=like.dtype, device=like.device)
    return bias.triu_(num_keys - num_new + 1).repeat(group, 1)
