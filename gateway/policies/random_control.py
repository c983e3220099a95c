"""The control for LVSpec: as many strict draft tokens per round, but picked at random.

Both keep about as many tokens; only how true the answers stay can tell whether relevance picks the right ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from gateway.policies.base import Decision, Memory
from gateway.policies.guards import Guards, Vocabulary
from gateway.policies.lvspec import num_strict
from gateway.policies.relaxed import relax, strictest
from gateway.values import AcceptancePolicy, Draft, Signals, Verified


@dataclass(frozen=True)
class RandomPolicy:
    """The policy with its parameters; the same seed picks the same places."""

    vocabulary: Vocabulary = field(repr=False)
    lam: float = 0.7
    window: int = 3
    seed: int = 0
    guards: Guards = field(default_factory=Guards)
    kind = AcceptancePolicy.RANDOM

    @property
    def signals(self) -> Signals:
        """What the guards need."""
        return Signals(log_probabilities=self.guards.needs_log_probabilities)

    def decide(self, draft: Draft, verified: Verified, memory: Memory) -> Decision:
        """Returns the decision of `Policy.decide`."""
        num_tokens = len(draft.token_ids)
        chance = random.Random(f"{self.seed} {memory.num_rounds}")
        scores = [chance.random() for _ in range(num_tokens)]
        return relax(
            draft,
            verified,
            memory,
            is_strict=strictest(scores, num_strict(self.lam, num_tokens)),
            window=self.window if self.lam > 0 else 0,
            guards=self.guards,
            vocabulary=self.vocabulary,
        )
