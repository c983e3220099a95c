"""FLy (arXiv 2511.22972): a mismatch is kept where the target is unsure and then agrees with what follows.

    gate      the target's entropy over its three likeliest tokens reaches a threshold
    window    the target would have chosen the next draft tokens itself, as many as the window asks for; a window that
              does not fit inside the draft rejects

CODE counts the window as the authors' program does: the mismatch is its first token, so window - 1 follow. PAPER counts
the tokens after the mismatch, so window follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.policies.base import Decision, Memory
from gateway.policies.guards import Guards, Vocabulary
from gateway.policies.walk import walk
from gateway.values import AcceptancePolicy, Draft, FlyVariant, Origin, Signals, Verified


@dataclass(frozen=True)
class FlyPolicy:
    """The policy with its parameters; the threshold is in nats."""

    vocabulary: Vocabulary = field(repr=False)
    window: int = 6
    entropy_threshold: float = 0.3
    variant: FlyVariant = FlyVariant.CODE
    guards: Guards = field(default_factory=Guards)
    kind = AcceptancePolicy.FLY

    @property
    def signals(self) -> Signals:
        """Entropy, and what the guards need."""
        return Signals(entropy=True, log_probabilities=self.guards.needs_log_probabilities)

    def decide(self, draft: Draft, verified: Verified, memory: Memory) -> Decision:
        """Returns the decision of `Policy.decide`."""
        num_following = self.window - 1 if self.variant is FlyVariant.CODE else self.window

        def verdict(index: int, num_loose_run: int) -> Origin | None:
            if self.guards.forbid(
                draft, verified, index, num_loose_run=num_loose_run, vocabulary=self.vocabulary
            ) or not is_unsure(verified, index, self.entropy_threshold):
                return None
            return Origin.LOOSE if _agrees(draft, verified, index + 1, num_following) else None

        return walk(draft, verified, memory, verdict)


def is_unsure(verified: Verified, index: int, threshold: float) -> bool:
    """Returns whether the target's entropy at a place reaches `threshold` nats."""
    return verified.measured.entropy[index] >= threshold


def _agrees(draft: Draft, verified: Verified, start: int, num_tokens: int) -> bool:
    stop = start + num_tokens
    return stop <= len(draft.token_ids) and draft.token_ids[start:stop] == verified.target_token_ids[start:stop]
