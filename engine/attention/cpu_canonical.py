"""The deterministic CPU kernel: a row's result has the same bits whatever rows it is computed with.

Matrix products of a CPU are bit-stable in the number of rows from MIN_ROWS on (probe.py checks it), but only for
equal shapes of the other operand. So keys are walked on a fixed grid of chunks; a chunk of the thread that is not
full is widened to a multiple of WIDTH with rows that are masked, never narrowed to what is visible. Added columns
weigh exactly zero, and online softmax visits the chunks in one fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import AttentionPlan, KvView
from engine.attention.parts import CausalPlan, is_long_prefill

MIN_ROWS = 4
CHUNK = 2048
WIDTH = 64


class CanonicalKernel:
    """An AttentionKernel whose steps have at least MIN_ROWS rows and bit-stable results."""

    name = "cpu-canonical"

    def plan(self, kv: KvView, num_new: int, num_rows: int, *, num_heads: int, scaling: float) -> AttentionPlan:
        if num_rows < MIN_ROWS:
            raise ValueError(f"a deterministic step has at least {MIN_ROWS} rows, not {num_rows}")
        if is_long_prefill(kv, num_new):  # the same call for everybody who prefills this prompt
            return CausalPlan(kv, num_new, scaling)
        group = num_heads // kv.thread[0].shape[1]
        return _CanonicalPlan([*_context_chunks(kv), *_thread_chunks(kv, num_new, num_rows, group)], scaling)


@dataclass(frozen=True)
class _Chunk:
    keys: tuple[Tensor, ...]  # per layer, transposed [num_kv_heads, head_dim, width]
    values: tuple[Tensor, ...]  # per layer [num_kv_heads, width, head_dim]
    hidden: Tensor | None  # bool [1 or group * num_rows, width], True where a row may not look
    missing: int  # rows by which the slab is too short for the width

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        if self.missing:
            return _widen(keys.transpose(1, 2), self.missing).transpose(1, 2), _widen(values, self.missing)
        return keys, values


def _widen(rows: Tensor, missing: int) -> Tensor:
    return F.pad(rows, (0, 0, 0, missing))


class _CanonicalPlan:
    def __init__(self, chunks: list[_Chunk], scaling: float) -> None:
        self._chunks, self._scaling = chunks, scaling

    def run(self, layer: int, query: Tensor) -> Tensor:
        _, num_heads, num_rows, head_dim = query.shape
        num_kv_heads = self._chunks[0].keys[layer].shape[0]
        folded = (query * self._scaling).reshape(num_kv_heads, num_heads // num_kv_heads * num_rows, head_dim)
        state: tuple[Tensor, Tensor, Tensor] | None = None
        for chunk in self._chunks:
            state = _advance(state, chunk, layer, folded)
        assert state is not None
        _, mass, weighted = state
        out = (weighted / mass).to(query.dtype)
        return out.view(1, num_heads, num_rows, head_dim).transpose(1, 2)


def _advance(
    state: tuple[Tensor, Tensor, Tensor] | None, chunk: _Chunk, layer: int, query: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Online softmax: (maximum, mass, weighted sum of values) with one more chunk."""
    keys, values = chunk.of_layer(layer)
    scores = torch.bmm(query, keys).float()
    if chunk.hidden is not None:
        scores.masked_fill_(chunk.hidden, float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    if state is None:
        weights = scores.sub_(top).exp_()
        return top, weights.sum(dim=-1, keepdim=True), torch.bmm(weights.to(values.dtype), values)
    old_top, mass, weighted = state
    new_top = torch.maximum(old_top, top)
    decay = (old_top - new_top).exp_()
    weights = scores.sub_(new_top).exp_()
    mass = mass * decay + weights.sum(dim=-1, keepdim=True)
    return new_top, mass, weighted * decay + torch.bmm(weights.to(values.dtype), values)


def _context_chunks(kv: KvView) -> list[_Chunk]:
    # The context's length never changes during a sequence, so its chunks need no widening, except that a very narrow
    # one would run as a product with a vector, which is not bit-stable.
    if kv.context is None:
        return []
    length, chunks = kv.context_len, []
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        missing = max(0, start + WIDTH - stop)
        hidden = (torch.arange(start, start + WIDTH) >= stop).unsqueeze(0) if missing else None
        chunks.append(_chunk(kv.context, start, stop, hidden, missing))
    return chunks


def _thread_chunks(kv: KvView, num_new: int, num_rows: int, group: int) -> list[_Chunk]:
    start_len, stop_len = kv.thread_len, kv.thread_len + num_new
    # Row i sees the thread up to and with itself; padding rows see what the last new row sees.
    visible_len = torch.arange(start_len + 1, start_len + num_rows + 1).clamp_(max=stop_len).repeat(group).unsqueeze(1)
    widened = -(-stop_len // WIDTH) * WIDTH
    chunks = []
    for start in range(0, widened, CHUNK):
        stop = min(start + CHUNK, widened)
        hidden = torch.arange(start, stop).unsqueeze(0) >= visible_len if stop > start_len + 1 else None
        chunks.append(_chunk(kv.thread, start, min(stop, kv.capacity), hidden, max(0, stop - kv.capacity)))
    return chunks


def _chunk(rows: tuple[Tensor, Tensor], start: int, stop: int, hidden: Tensor | None, missing: int) -> _Chunk:
    keys, values = rows
    return _Chunk(keys[:, :, start:stop].transpose(2, 3).unbind(0), values[:, :, start:stop].unbind(0), hidden, missing)
