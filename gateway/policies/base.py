"""The seam between verification and acceptance: a policy turns a draft and the target's choices into a decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.values import AcceptancePolicy, Draft, Guarantee, Origin, Signals, Token, Verified

LOOSE_ORIGINS = frozenset({Origin.LOOSE, Origin.SALVAGED})


@dataclass(frozen=True)
class Memory:
    """What a policy knows of the answer's earlier rounds; a decision carries what the next one will know.

    `relevance` holds the score of every draft token so far, where a policy wants them.
    """

    num_rounds: int = 0
    relevance: tuple[float, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What a round commits: the first `num_accepted` draft tokens and then one token of the verifier."""

    num_accepted: int
    tokens: tuple[Token, ...]
    memory: Memory = Memory()


class Policy(Protocol):
    """Decides which draft tokens an answer keeps. Pure: the same values give the same decision."""

    @property
    def kind(self) -> AcceptancePolicy:
        """The policy's name."""

    @property
    def signals(self) -> Signals:
        """What the verifier must measure for it."""

    def decide(self, draft: Draft, verified: Verified, memory: Memory) -> Decision:
        """Returns what to commit; `verified` has one choice more than `draft` has tokens."""


def guarantee_of(num_loose_tokens: int, *, is_context_lossy: bool) -> Guarantee:
    """Returns what held for an answer: one without a kept mismatch is that of plain decoding, whatever the policy."""
    if num_loose_tokens:
        return Guarantee.LOOSE
    return Guarantee.LOSSY_CONTEXT if is_context_lossy else Guarantee.LOSSLESS
