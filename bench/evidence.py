"""Where do a question's words look? Their attention to each visual entry, and how much of it meets the evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class QueryKeeper:
    """A QueryTap that keeps the queries of every layer, [num_heads, num_rows, head_dim]."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []

    def on_layer(self, layer: int, query: Tensor) -> None:
        self.queries.append(query.clone())


def attention_rows(
    queries: Tensor, context_keys: Tensor, thread_keys: Tensor, visual_index: Tensor, scaling: float
) -> Tensor:
    """Attention of a prompt's rows to each visual entry, summed over the heads of a group.

    Returns [num_kv_heads, num_rows, num_visual]. One layer: `queries` [num_heads, num_rows, head_dim] of all rows of
    the prompt, `context_keys` [num_kv_heads, num_context, head_dim], `thread_keys` [num_kv_heads, num_rows, head_dim].
    """
    num_heads, num_rows, head_dim = queries.shape
    num_kv_heads = context_keys.shape[0]
    grouped = queries.reshape(num_kv_heads, num_heads // num_kv_heads, num_rows, head_dim) * scaling
    in_context = grouped @ context_keys[:, None].transpose(-1, -2)
    later = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
    in_thread = (grouped @ thread_keys[:, None].transpose(-1, -2)).masked_fill(later, float("-inf"))
    attention = torch.cat([in_context, in_thread], dim=-1).softmax(-1)
    return attention[..., visual_index].sum(1)


@dataclass(frozen=True)
class PromptRows:
    """Rows of a prompt: the question's own words, and from there to the end of the template."""

    question: slice
    to_end: slice


# scores [num_kv_heads, num_visual] from attention [num_kv_heads, num_rows, num_visual]
RULES: dict[str, Callable[[Tensor, PromptRows], Tensor]] = {
    "mean over the question": lambda attention, rows: attention[:, rows.question].mean(1),
    "mean to the prompt's end": lambda attention, rows: attention[:, rows.to_end].mean(1),
    "max over the question": lambda attention, rows: attention[:, rows.question].amax(1),
    "max to the prompt's end": lambda attention, rows: attention[:, rows.to_end].amax(1),
    "last token of the prompt": lambda attention, rows: attention[:, -1],
}


@dataclass(frozen=True)
class EvidenceShares:
    """Of one question, for each layer."""

    of_attention: list[float]  # of what the question's words give visual entries, the part that falls on evidence
    of_selected: list[float]  # of the selected entries, the part that is evidence
    found: list[float]  # of the evidence, the part that is selected, for at least one KV head
    by_chance: float  # of all visual entries, the part that is evidence


def evidence_shares(
    attention: list[Tensor], rows: PromptRows, selection: Tensor, visual_index: Tensor, evidence: Tensor
) -> EvidenceShares:
    """`attention` of each layer as above; `selection` [num_layers, num_kv_heads, num_selected] in the context;
    `evidence` [num_visual] bool."""
    place = torch.full((int(visual_index.max()) + 1,), -1)
    place[visual_index] = torch.arange(len(visual_index))
    of_attention, of_selected, found = [], [], []
    for layer, looked in enumerate(attention):
        by_entry = looked[:, rows.question].sum((0, 1))
        of_attention.append(float(by_entry[evidence].sum() / by_entry.sum()))
        selected = place[selection[layer].long()]  # [num_kv_heads, num_selected]
        of_selected.append(float(evidence[selected].float().mean()))
        is_selected = torch.zeros_like(evidence)
        is_selected[selected.flatten()] = True
        found.append(float((is_selected & evidence).sum() / evidence.sum()))
    return EvidenceShares(of_attention, of_selected, found, float(evidence.float().mean()))
