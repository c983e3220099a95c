"""Which visual entries a sparse drafter reads: picked once per question, per layer and KV head, beside the prefill.

After Sparse-to-Dense (arXiv 2505.19155, section 3.2): the sum over the query heads of a KV group of the softmax
attention to each visual entry; the largest are kept, in order of position. The paper takes the mean over the
question's tokens. Here it is the maximum over all tokens from the question's first word to the end of the prompt: an
entry that one of them looks at sharply counts, however many others look elsewhere; on the tiny models' validation
questions it drafted better than the mean.

For a smaller model, which reads a video of its own, one set of visual tokens is kept for all layers (SpecVLM, arXiv
2508.16201): first the fewest that hold a share of the question's attention, summed over rows, heads and layers, then
evenly spaced ones up to the budget.

The scores are computed from the queries and the cached keys, never by asking the model for its attention: that would
switch kernels, and the KV would no longer be that of a plain prefill.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from engine.layout import KvLayout

# Scores are made in blocks of query rows, so that a long context never needs more than this at once.
_BLOCK_BYTES = 32 * 1024 * 1024


# Stage one of the two-stage method: this share of the question's attention (SpecVLM's 40 to 50 %).
_STAGE_ONE_MASS = 0.45


class Reduction(StrEnum):
    """How attention over rows becomes one score per visual entry."""

    MAX = "max"
    SUM = "sum"

    def over_rows(self, attention: Tensor) -> Tensor:
        """Reduces [num_rows, num_visual] to [num_visual]."""
        return attention.amax(dim=0) if self is Reduction.MAX else attention.sum(dim=0)

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """Merges the scores of two sets of rows."""
        return torch.maximum(one, other) if self is Reduction.MAX else one + other


class SelectionMethod(StrEnum):
    """How visual entries are picked; by the last two the same for all layers and heads, as a pruned video needs."""

    ATTENTION = "attention"
    RANDOM = "random"
    RECENT = "recent"
    TWO_STAGE = "two_stage"
    UNIFORM = "uniform"

    @property
    def reduction(self) -> Reduction | None:
        """How attention over the question's rows becomes a score; None for a method without scores."""
        return {"attention": Reduction.MAX, "two_stage": Reduction.SUM}.get(self.value)


def attention_scores(
    queries: Tensor,
    context_keys: Tensor,
    thread_keys: Tensor,
    first_row: int,
    visual_index: Tensor,
    scaling: float,
    reduction: Reduction = Reduction.MAX,
) -> Tensor:
    """Returns the attention each visual entry gets, reduced over the rows: float32 [num_kv_heads, num_visual].

    `queries` [num_heads, num_rows, head_dim], `context_keys` [num_kv_heads, num_context, head_dim] and `thread_keys`
    [num_kv_heads, num_thread, head_dim] have positions applied. Row i stands at thread row first_row + i and attends
    the context and the thread up to itself. `visual_index` [num_visual] names the visual entries among the context's.
    """
    num_heads, num_rows, head_dim = queries.shape
    num_kv_heads, num_context, _ = context_keys.shape
    group = num_heads // num_kv_heads
    grouped = (queries.float() * scaling).reshape(num_kv_heads, group, num_rows, head_dim)
    own = thread_keys[:, : first_row + num_rows].float()
    block = max(1, _BLOCK_BYTES // (4 * num_context * group))
    best = queries.new_zeros(num_kv_heads, visual_index.numel(), dtype=torch.float32)
    for head in range(num_kv_heads):
        keys = context_keys[head].float().T  # [head_dim, num_context]
        for start in range(0, num_rows, block):
            rows = grouped[head, :, start : start + block]
            in_context = rows @ keys  # [group, rows, num_context]
            mass = torch.logaddexp(in_context.logsumexp(-1), _own_mass(rows, own[head], first_row + start))
            attention = (in_context[:, :, visual_index] - mass.unsqueeze(-1)).exp_()
            best[head] = reduction.merge(best[head], reduction.over_rows(attention.sum(dim=0)))
    return best


def _own_mass(rows: Tensor, keys: Tensor, first_row: int) -> Tensor:
    """Log of the mass that rows [group, num_rows, head_dim] give the thread up to themselves: [group, num_rows]."""
    places = torch.arange(keys.shape[0], device=keys.device)
    is_later = places > first_row + torch.arange(rows.shape[1], device=keys.device).unsqueeze(1)
    return (rows @ keys.T).masked_fill_(is_later, float("-inf")).logsumexp(-1)


class ScoreTap:
    """A QueryTap that scores the visual entries of a context with the queries of chosen rows, layer by layer.

    `context_keys` [num_layers, num_kv_heads, num_context, head_dim]; `thread_keys` is the thread the forward writes to,
    [num_layers, num_kv_heads, capacity, head_dim], from `thread_len` on. `rows` are the scoring ones among the rows of
    the forward. After it, `scores` is float32 [num_layers, num_kv_heads, num_visual].
    """

    def __init__(
        self,
        context_keys: Tensor,
        thread_keys: Tensor,
        thread_len: int,
        *,
        visual_index: Tensor,
        rows: slice,
        scaling: float,
        reduction: Reduction = Reduction.MAX,
    ) -> None:
        num_layers, num_kv_heads = context_keys.shape[:2]
        self._context_keys, self._thread_keys = context_keys, thread_keys
        self._first_row = thread_len + rows.start
        self._visual_index, self._rows, self._scaling = visual_index, rows, scaling
        self.reduction = reduction
        self.scores = torch.zeros(
            num_layers, num_kv_heads, visual_index.numel(), dtype=torch.float32, device=context_keys.device
        )

    def scores_to_end_of(self, num_rows: int) -> bool:
        """Whether the scoring rows are the last ones of a forward of `num_rows`."""
        return bool(self._rows.stop == num_rows)

    @property
    def scoring(self) -> tuple[int, bool]:
        """The first scoring row, and whether the largest attention of the rows counts rather than their sum."""
        return self._rows.start, self.reduction is Reduction.MAX

    def take(self, scores: Tensor) -> None:
        """Takes the scores of all context entries, [num_layers, num_kv_heads, num_context], from who computed them."""
        self.scores = scores[:, :, self._visual_index]

    def on_layer(self, layer: int, query: Tensor) -> None:
        """Takes the queries of one layer, [num_heads, num_rows, head_dim]; the layer's new keys are written already."""
        self.scores[layer] = attention_scores(
            query[:, self._rows],
            self._context_keys[layer],
            self._thread_keys[layer],
            self._first_row,
            self._visual_index,
            self._scaling,
            self.reduction,
        )


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
    ATTENTION and TWO_STAGE only, `generator` (on the CPU) for RANDOM only. Raises ValueError when more is asked for
    than there is.
    """
    num_visual = visual_index.numel()
    if not 0 <= num_selected <= num_visual:
        raise ValueError(f"num_selected must be in 0..{num_visual}, not {num_selected}")
    shape = (layout.num_layers, layout.num_kv_heads)
    if method.reduction is not None and scores is None:
        raise ValueError(f"{method} selection needs scores")
    if method is SelectionMethod.ATTENTION and scores is not None:
        picked = _top(scores, num_selected)
    elif method is SelectionMethod.TWO_STAGE and scores is not None:
        picked = _two_stage(scores.sum(dim=(0, 1)), num_selected).expand(*shape, num_selected)
    elif method is SelectionMethod.UNIFORM:
        picked = evenly_spaced(num_visual, num_selected).expand(*shape, num_selected)
    elif method is SelectionMethod.RANDOM:
        picked = _top(torch.rand(*shape, num_visual, generator=generator), num_selected)
    else:
        picked = _sink_and_recent(num_visual, num_selected).expand(*shape, num_selected)
    return visual_index[picked.to(visual_index.device)].to(torch.int32)


def _top(scores: Tensor, num_selected: int) -> Tensor:
    return scores.topk(num_selected, dim=-1, sorted=False).indices.sort(dim=-1).values


def _two_stage(scores: Tensor, num_selected: int) -> Tensor:
    """Returns the places of `num_selected` of the entries with `scores` [num_visual], ascending."""
    ordered, places = scores.double().sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered  # attention that the larger ones hold
    num_first = int((before < _STAGE_ONE_MASS * ordered.sum()).sum())
    first = places[: min(num_first, num_selected)]
    is_left = torch.ones(scores.numel(), dtype=torch.bool, device=scores.device)
    is_left[first] = False
    left = is_left.nonzero()[:, 0]
    filled = left[evenly_spaced(left.numel(), num_selected - first.numel()).to(left.device)]
    return torch.cat([first, filled]).sort().values


def evenly_spaced(num_entries: int, num_selected: int) -> Tensor:
    """Returns the middles of `num_selected` equal stretches of `num_entries` places, int64, ascending and distinct."""
    return (2 * torch.arange(num_selected) + 1) * num_entries // max(1, 2 * num_selected)


def _sink_and_recent(num_visual: int, num_selected: int) -> Tensor:
    # StreamingLLM (arXiv 2309.17453): a few first entries soak up attention; the rest of the budget is the latest.
    num_sink = min(4, num_selected)
    recent = torch.arange(num_visual - (num_selected - num_sink), num_visual)
    return torch.cat([torch.arange(num_sink), recent])
