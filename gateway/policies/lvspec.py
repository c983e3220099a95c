"""LVSpec (arXiv 2604.05650): draft tokens that do not look at the video need not match the target.

A share `lam` (the paper's lambda) of the draft tokens, those of least visual relevance, is kept as drafted; the others
are strict. The paper does not say among which tokens the share is counted:

    PER_ROUND   those of the round: the ceil((1 - lam) * n) most relevant of n are strict
    RUNNING     all of the answer so far, this round's included
    THRESHOLD   none: a token is strict when its relevance reaches a fixed value

At lam 0 nothing is kept that does not match, shifted or not: it is the exact policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from gateway.policies.base import Decision, Memory
from gateway.policies.guards import Guards, Vocabulary
from gateway.policies.relaxed import relax, strictest
from gateway.values import AcceptancePolicy, Draft, RelevancePool, Signals, Verified


@dataclass(frozen=True)
class LvspecPolicy:
    """The policy with its parameters. `threshold` is for pool THRESHOLD only; `num_nearest` None is the model's own."""

    vocabulary: Vocabulary = field(repr=False)
    lam: float = 0.7
    num_nearest: int | None = None
    window: int = 3
    pool: RelevancePool = RelevancePool.PER_ROUND
    threshold: float = 0.0
    guards: Guards = field(default_factory=Guards)
    kind = AcceptancePolicy.LVSPEC

    @property
    def signals(self) -> Signals:
        """Relevance, and what the guards need."""
        return Signals(
            relevance=True, num_nearest=self.num_nearest, log_probabilities=self.guards.needs_log_probabilities
        )

    def decide(self, draft: Draft, verified: Verified, memory: Memory) -> Decision:
        """Returns the decision of `Policy.decide`."""
        relevance = verified.measured.relevance[: len(draft.token_ids)]
        decision = relax(
            draft,
            verified,
            memory,
            is_strict=self._strict(relevance, memory.relevance),
            window=self.window if self.lam > 0 else 0,
            guards=self.guards,
            vocabulary=self.vocabulary,
        )
        seen = memory.relevance + relevance if self.pool is RelevancePool.RUNNING else ()
        return replace(decision, memory=replace(decision.memory, relevance=seen))

    def _strict(self, relevance: tuple[float, ...], earlier: tuple[float, ...]) -> list[bool]:
        if self.lam <= 0:
            return [True] * len(relevance)
        if self.pool is RelevancePool.THRESHOLD:
            return [score >= self.threshold for score in relevance]
        pool = earlier + relevance if self.pool is RelevancePool.RUNNING else relevance
        return strictest(pool, num_strict(self.lam, len(pool)))[len(pool) - len(relevance) :]


def num_strict(lam: float, num_tokens: int) -> int:
    """Returns how many of `num_tokens` are strict; 1 - 0.7 of 10 is three, whatever floating point says."""
    return math.ceil(round((1 - lam) * num_tokens, 6))
