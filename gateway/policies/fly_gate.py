"""FLy's gate alone: a mismatch is kept wherever the target is unsure (arXiv 2511.22972, without its window)."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.policies.base import Decision, Memory
from gateway.policies.fly import is_unsure
from gateway.policies.guards import Guards, Vocabulary
from gateway.policies.walk import walk
from gateway.values import AcceptancePolicy, Draft, Origin, Signals, Verified


@dataclass(frozen=True)
class FlyGatePolicy:
    """The policy with its parameters; the threshold is in nats."""

    vocabulary: Vocabulary = field(repr=False)
    entropy_threshold: float = 0.3
    guards: Guards = field(default_factory=Guards)
    kind = AcceptancePolicy.FLY_GATE

    @property
    def signals(self) -> Signals:
        """Entropy, and what the guards need."""
        return Signals(entropy=True, log_probabilities=self.guards.needs_log_probabilities)

    def decide(self, draft: Draft, verified: Verified, memory: Memory) -> Decision:
        """Returns the decision of `Policy.decide`."""

        def verdict(index: int, num_loose_run: int) -> Origin | None:
            is_forbidden = self.guards.forbid(
                draft, verified, index, num_loose_run=num_loose_run, vocabulary=self.vocabulary
            )
            return None if is_forbidden or not is_unsure(verified, index, self.entropy_threshold) else Origin.LOOSE

        return walk(draft, verified, memory, verdict)
