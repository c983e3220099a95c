"""Early exit: the model's first layers draft, over the whole KV of those layers (LayerSkip, arXiv 2404.16710).

The KV of the first layers does not depend on the others, so the verifier's is exact for a model cut short. Without the
training that LayerSkip adds, an early layer says little about the last: a baseline.
"""

from __future__ import annotations

from drafter_svc.drafts import SequenceSpec
from drafter_svc.shared_kv import SharedKvSequence
from engine.kv_share import MappedPool
from engine.runner import TextRunner


class LayerskipSequence(SharedKvSequence):
    """One sequence of a model cut short; `runner` runs its first layers."""

    def __init__(self, runner: TextRunner, pool: MappedPool, spec: SequenceSpec) -> None:
        """Raises KvStale and ValueError as SparseSequence does."""
        keys, values = pool.views(spec.context)
        num_layers, num_tokens = runner.num_layers, spec.num_context_tokens
        super().__init__(runner, pool, spec, num_layers=num_layers)
        self.read_in_place((keys[:num_layers, :, :num_tokens], values[:num_layers, :, :num_tokens]))
