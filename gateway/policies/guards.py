"""Mismatches that no loose policy keeps, however unlikely they are to matter: each guard has a switch.

A wrong end of the answer, a wrong number and a lost "not" change what an answer says even where the video is not looked
at, so they are left to the target. The papers have none of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from gateway.values import Draft, Verified


class WordKind(Enum):
    """What kind of word a token is, as far as guards care."""

    OTHER = auto()
    SPECIAL = auto()  # ends the answer, or is markup
    NUMBER = auto()
    NEGATION = auto()


class Vocabulary(Protocol):
    """Knows the words behind token ids."""

    def kind_of(self, token_id: int) -> WordKind:
        """Returns the kind of a token's word."""


@dataclass(frozen=True)
class Guards:
    """Which mismatches are never kept. `max_loose_run` 0 is no limit; `min_probability` is the target's of the draft.

    A run of kept mismatches ends with its round, which always commits a token of the verifier's own.
    """

    special: bool = True
    numbers: bool = True
    negations: bool = True
    max_loose_run: int = 0
    min_probability: float = 0.0

    @property
    def needs_log_probabilities(self) -> bool:
        """Whether the verifier must say how likely draft tokens are."""
        return self.min_probability > 0

    def forbid(
        self, draft: Draft, verified: Verified, index: int, *, num_loose_run: int, vocabulary: Vocabulary
    ) -> bool:
        """Returns whether the mismatch at `index` must be rejected."""
        if self.max_loose_run and num_loose_run >= self.max_loose_run:
            return True
        if self.needs_log_probabilities and not self._is_likely(verified.measured.draft_log_probabilities[index]):
            return True
        sides = draft.token_ids[index], verified.target_token_ids[index]
        return any(self._guards_kind(vocabulary.kind_of(token_id)) for token_id in sides)

    def _is_likely(self, log_probability: float) -> bool:
        return math.exp(log_probability) >= self.min_probability

    def _guards_kind(self, kind: WordKind) -> bool:
        return {
            WordKind.OTHER: False,
            WordKind.SPECIAL: self.special,
            WordKind.NUMBER: self.numbers,
            WordKind.NEGATION: self.negations,
        }[kind]
