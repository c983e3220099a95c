"""Which rows of a prompt are visual, and the features that stand there in place of embeddings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

Span = tuple[int, int]  # start, number of tokens


def visual_spans(token_ids: Sequence[int], placeholders: Collection[int]) -> tuple[Span, ...]:
    """Returns the runs of placeholders, ascending."""
    spans: list[Span] = []
    for row, token_id in enumerate(token_ids):
        if token_id not in placeholders:
            continue
        if spans and sum(spans[-1]) == row:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((row, 1))
    return tuple(spans)


def visual_index(spans: Sequence[Span], device: torch.device | None = None) -> Tensor:
    """Returns the rows of spans, int64 [num_visual], ascending."""
    rows = [torch.arange(start, start + num_tokens, device=device) for start, num_tokens in spans]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64, device=device)


def place_features(embeds: Tensor, rows: Tensor, features: Tensor) -> Tensor | None:
    """Puts features [num_visual, width] at `rows` [num_visual] of embeddings [num_tokens, hidden].

    A width beyond hidden is for the layers: it is returned as a Block's `added` [width / hidden - 1, num_tokens,
    hidden]; None when there is nothing beyond.
    """
    hidden = embeds.shape[1]
    embeds[rows] = features[:, :hidden].to(embeds.dtype)
    num_added = features.shape[1] // hidden - 1
    if num_added == 0 or rows.numel() == 0:
        return None
    added = embeds.new_zeros(num_added, *embeds.shape)
    added[:, rows] = features[:, hidden:].to(embeds.dtype).reshape(-1, num_added, hidden).transpose(0, 1)
    return added
