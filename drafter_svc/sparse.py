"""Sparse-to-Dense drafting (arXiv 2505.19155): the verifier's own weights over a sparse view of its KV.

Read are the context's text rows and, per layer and KV head, the visual rows that the verifier selected for the
question. The gathered keys carry their RoPE already, so a row may lie anywhere; new tokens use their own positions.
"""

from __future__ import annotations

import torch

from drafter_svc.drafts import SequenceSpec
from drafter_svc.shared_kv import SharedKvSequence, checked_selection, text_rows
from engine.kv_share import MappedPool
from engine.runner import TextRunner


class SparseSequence(SharedKvSequence):
    """One sequence over its sparse view."""

    def __init__(self, runner: TextRunner, pool: MappedPool, spec: SequenceSpec) -> None:
        """Gathers the view; KvStale when the pool does not hold what `spec` says, ValueError for a slab outside it."""
        context = pool.views(spec.context)
        selection = checked_selection(spec, pool)
        super().__init__(runner, pool, spec, num_layers=selection.shape[0])
        text = torch.tensor(text_rows(spec), device=selection.device)
        self.read_copied(context, torch.cat([text.expand(*selection.shape[:2], -1), selection], dim=2))
