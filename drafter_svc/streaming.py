"""Streaming drafts: the first entries of the context and the latest, whatever they hold (arXiv 2309.17453).

The budget is Sparse-to-Dense's, text entries included, so that the two differ in what they look at only. No selection
is made; the question and the answer are read whole, as by every kind.
"""

from __future__ import annotations

import torch

from drafter_svc.drafts import SequenceSpec
from drafter_svc.shared_kv import SharedKvSequence, text_rows
from engine.kv_share import MappedPool
from engine.runner import TextRunner

NUM_SINK = 4


class StreamingSequence(SharedKvSequence):
    """One sequence over the ends of its context."""

    def __init__(self, runner: TextRunner, pool: MappedPool, spec: SequenceSpec) -> None:
        """Copies the rows; raises KvStale and ValueError as SparseSequence does."""
        keys, values = pool.views(spec.context)
        super().__init__(runner, pool, spec, num_layers=keys.shape[0])
        rows = torch.tensor(sink_and_recent(spec.num_context_tokens, _budget(spec)), device=keys.device)
        self.read_copied((keys, values), rows.expand(*keys.shape[:2], -1))


def sink_and_recent(num_tokens: int, budget: int) -> list[int]:
    """Returns `budget` of `num_tokens` rows: the first four, then the last ones."""
    num_kept = min(budget, num_tokens)
    num_sink = min(NUM_SINK, num_kept)
    return [*range(num_sink), *range(num_tokens - (num_kept - num_sink), num_tokens)]


def _budget(spec: SequenceSpec) -> int:
    num_text = len(text_rows(spec))
    return num_text + round(spec.visual_budget * (spec.num_context_tokens - num_text))
