"""The rounds of a verifier's sequence: their values, and which may run (engine/round_order.py draws the lengths)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.round_order import RoundOrder
from foveate.rpc.errors import FieldViolation, InvalidArgument


@dataclass(frozen=True)
class Round:
    """One round: truncate to `base_len`, append `token_ids`, verify `draft_token_ids`."""

    sequence_id: str
    round: int
    base_len: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens at a place, the likeliest first."""

    token_ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """What was asked for beside the choices, each per place or empty; see `foveate.v1.RoundVerified`."""

    relevance: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()
    draft_log_probabilities: tuple[float, ...] = ()
    target_log_probabilities: tuple[float, ...] = ()
    top: tuple[TopTokens, ...] = ()


@dataclass(frozen=True)
class Verified:
    """The target's choices: [i] stands in place of draft token i, one more after the last. Device time in us."""

    round: int
    base_len: int
    target_token_ids: tuple[int, ...]
    model_us: int
    measured: Measured = Measured()


class RoundGuard:
    """Admits rounds of one sequence. `max_len` bounds it with drafts; ids must be below `vocab_size`."""

    def __init__(
        self, *, sequence_id: str, num_prompt_tokens: int, max_len: int, max_draft_tokens: int, vocab_size: int
    ) -> None:
        self._sequence_id = sequence_id
        self._max_len = max_len
        self._max_draft_tokens = max_draft_tokens
        self._vocab_size = vocab_size
        self._order: RoundOrder[Round, Verified] = RoundOrder(num_prompt_tokens)

    def admit(self, asked: Round) -> Verified | None:
        """Returns the earlier reply of a repeated round, None when the round may run.

        Raises InvalidArgument for content that no round may have, FailedPrecondition for a round that does not follow.
        """
        self._validate(asked)
        return self._order.admit(asked)

    def record(self, asked: Round, reply: Verified) -> None:
        """Notes a round that ran."""
        self._order.record(asked, reply, num_draft_tokens=len(asked.draft_token_ids))

    def _validate(self, asked: Round) -> None:
        violations = []
        if asked.sequence_id != self._sequence_id:
            violations.append(FieldViolation("round.sequence_id", "is not the one this stream opened"))
        if not asked.token_ids:
            violations.append(FieldViolation("round.token_ids", "must hold at least one token"))
        if len(asked.draft_token_ids) > self._max_draft_tokens:
            violations.append(FieldViolation("round.draft_token_ids", f"must be at most {self._max_draft_tokens}"))
        if any(token_id >= self._vocab_size for token_id in asked.token_ids + asked.draft_token_ids):
            violations.append(FieldViolation("round.draft_token_ids", f"ids must be below {self._vocab_size}"))
        end = asked.base_len + len(asked.token_ids) + len(asked.draft_token_ids)
        if end > self._max_len:
            violations.append(FieldViolation("round.base_len", f"the sequence ends at {self._max_len}, not at {end}"))
        if violations:
            raise InvalidArgument("the round is not valid", violations=violations)
