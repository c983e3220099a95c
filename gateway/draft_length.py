"""How many tokens to draft in the next round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class DraftLength(Protocol):
    """Chooses the draft length of a round; a controller that learns from measured costs fits here."""

    def next(self, remaining: int) -> int:
        """Returns num_draft_tokens for an answer that has room for `remaining` more tokens."""


@dataclass(frozen=True)
class FixedDraftLength:
    """Always the same length, clipped so that a fully accepted draft and the token after it still fit."""

    num_draft_tokens: int

    def next(self, remaining: int) -> int:
        """Returns the length, at most `remaining` - 1 and never negative."""
        return max(0, min(self.num_draft_tokens, remaining - 1))
