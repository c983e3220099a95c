"""Which visual entries a sparse drafter reads: picked once per question, per layer and KV head, beside the prefill.

Attention selection is Sparse-to-Dense's (arXiv 2505.19155, section 3.2): the mean over the question's own words, the
sum over the query heads of a KV group, of the softmax attention to each visual entry; the largest are kept, in order
of position. The scores are computed from the question's queries and the cached keys, never by asking the model for
its attention: that would switch kernels, and the KV would no longer be that of a plain prefill.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from engine.layout import KvLayout

# Scores are made in blocks of query rows, so that a long context never needs more than this at once.
_BLOCK_BYTES = 32 * 1024 * 1024


class SelectionMethod(StrEnum):
    """How visual entries are picked."""

    ATTENTION = "attention"
    RANDOM = "random"
    RECENT = "recent"


def attention_scores(queries: Tensor, keys: Tensor, visual_index: Tensor, scaling: float) -> Tensor:
    """Returns the attention each visual entry gets, float32 [num_kv_heads, num_visual].

    `queries` [num_heads, num_rows, head_dim] and `keys` [num_kv_heads, num_context, head_dim], both with positions
    applied; `visual_index` [num_visual] names the visual entries among the context's. Softmax runs over the whole
    context.
    """
    num_heads, num_rows, head_dim = queries.shape
    num_kv_heads, num_context, _ = keys.shape
    group = num_heads // num_kv_heads
    folded = (queries.float() * scaling).reshape(num_kv_heads, group * num_rows, head_dim)
    block = max(1, _BLOCK_BYTES // (4 * num_context))
    total = keys.new_zeros(num_kv_heads, num_context, dtype=torch.float32)
    for head in range(num_kv_heads):
        transposed = keys[head].float().T  # [head_dim, num_context]
        for rows in torch.split(folded[head], block):
            total[head] += torch.softmax(rows @ transposed, dim=-1).sum(dim=0)
    return total[:, visual_index] / num_rows


class ScoreTap:
    """A QueryTap that scores the visual entries of a context with the queries of chosen rows, layer by layer.

    `context_keys` [num_layers, num_kv_heads, num_context, head_dim]; `rows` are the question's own words among the
    rows of the forward. After it, `scores` is float32 [num_layers, num_kv_heads, num_visual].
    """

    def __init__(self, context_keys: Tensor, visual_index: Tensor, rows: slice, scaling: float) -> None:
        num_layers, num_kv_heads = context_keys.shape[:2]
        self._keys, self._visual_index, self._rows, self._scaling = context_keys, visual_index, rows, scaling
        self.scores = torch.zeros(
            num_layers, num_kv_heads, visual_index.numel(), dtype=torch.float32, device=context_keys.device
        )

    def on_layer(self, layer: int, query: Tensor) -> None:
        """Takes the queries of one layer, [num_heads, num_rows, head_dim]."""
        rows = query[:, self._rows]
        self.scores[layer] = attention_scores(rows, self._keys[layer], self._visual_index, self._scaling)


def select(
    method: SelectionMethod,
    scores: Tensor | None,
    *,
    visual_index: Tensor,
    num_selected: int,
    layout: KvLayout,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns the entries to keep, int32 [num_layers, num_kv_heads, num_selected]: ascending indices into the context.

    `visual_index` int64 [num_visual] is ascending. `scores` [num_layers, num_kv_heads, num_visual] is needed for
    ATTENTION only, `generator` (on the CPU) for RANDOM only. Raises ValueError when more is asked for than there is.
    """
    num_visual = visual_index.numel()
    if not 0 <= num_selected <= num_visual:
        raise ValueError(f"num_selected must be in 0..{num_visual}, not {num_selected}")
    shape = (layout.num_layers, layout.num_kv_heads)
    if method is SelectionMethod.ATTENTION:
        if scores is None:
            raise ValueError("attention selection needs scores")
        picked = _top(scores, num_selected)
    elif method is SelectionMethod.RANDOM:
        picked = _top(torch.rand(*shape, num_visual, generator=generator), num_selected)
    else:
        picked = _sink_and_recent(num_visual, num_selected).expand(*shape, num_selected)
    return visual_index[picked.to(visual_index.device)].to(torch.int32)


def _top(scores: Tensor, num_selected: int) -> Tensor:
    return scores.topk(num_selected, dim=-1, sorted=False).indices.sort(dim=-1).values


def _sink_and_recent(num_visual: int, num_selected: int) -> Tensor:
    # StreamingLLM (arXiv 2309.17453): a few first entries soak up attention; the rest of the budget is the latest.
    num_sink = min(4, num_selected)
    recent = torch.arange(num_visual - (num_selected - num_sink), num_visual)
    return torch.cat([torch.arange(num_sink), recent])
