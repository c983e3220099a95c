"""The seam between verification and acceptance: a policy turns a draft and the target's choices into a decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.values import Draft, Guarantee, Token, Verified


@dataclass(frozen=True)
class Decision:
    """What a round commits: the first `num_accepted` draft tokens and then one token of the verifier.

    `num_loose` of the accepted ones differ from the target's choice; always 0 under an exact policy.
    """

    num_accepted: int
    tokens: tuple[Token, ...]
    num_loose: int = 0


class Policy(Protocol):
    """Decides which draft tokens an answer keeps. Pure: the same values give the same decision."""

    @property
    def guarantee(self) -> Guarantee:
        """What answers under this policy promise."""

    def decide(self, draft: Draft, verified: Verified) -> Decision:
        """Returns what to commit; `verified` has one choice more than `draft` has tokens."""
