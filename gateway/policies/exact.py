"""The exact policy: accept the longest prefix of the draft that the target would have chosen itself.

With shared noise (docs/sampling.md) equality of token ids is enough at any temperature, so the answer is that of plain
decoding whatever the drafter proposes (Sparse-to-Dense, arXiv 2505.19155).
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.policies.base import Decision, Memory
from gateway.policies.walk import walk
from gateway.values import AcceptancePolicy, Draft, Signals, Verified


@dataclass(frozen=True)
class ExactPolicy:
    """Longest matching prefix, then the verifier's token: recovered, bonus, or plain when nothing was drafted."""

    kind = AcceptancePolicy.EXACT
    signals = Signals()

    def decide(self, draft: Draft, verified: Verified, memory: Memory) -> Decision:
        """Returns the decision of `Policy.decide`."""
        return walk(draft, verified, memory, lambda index, num_loose_run: None)
