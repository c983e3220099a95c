"""Compare-and-set on a sequence's length: which rounds may run, and which only repeat an answer already given.

rows of the sequence     [0 ........ base_len)[token_ids)[draft_token_ids)
after the round          known good up to base_len + len(token_ids); up to len(draft_token_ids) more may be accepted
base_len of the next     anywhere in that last stretch: truncation is the rollback
"""

from __future__ import annotations

from dataclasses import dataclass

from foveate.rpc.errors import FailedPrecondition, FieldViolation, InvalidArgument


@dataclass(frozen=True)
class Round:
    """One round: truncate to `base_len`, append `token_ids`, verify `draft_token_ids`."""

    sequence_id: str
    round: int
    base_len: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Verified:
    """The target's choices: [i] stands in place of draft token i, one more after the last. Device time in us."""

    round: int
    base_len: int
    target_token_ids: tuple[int, ...]
    model_us: int


class RoundGuard:
    """The last round of one sequence. `max_len` bounds the sequence with drafts; ids must be below `vocab_size`."""

    def __init__(
        self, *, sequence_id: str, num_prompt_tokens: int, max_len: int, max_draft_tokens: int, vocab_size: int
    ) -> None:
        self._sequence_id = sequence_id
        self._max_len = max_len
        self._max_draft_tokens = max_draft_tokens
        self._vocab_size = vocab_size
        self._legal_base_lens = range(num_prompt_tokens, num_prompt_tokens + 1)
        self._last: Round | None = None
        self._last_reply: Verified | None = None

    def admit(self, asked: Round) -> Verified | None:
        """Returns the earlier reply of a repeated round, None when the round may run.

        FAILED_PRECONDITION (BASE_LEN_MISMATCH) for a stale, skipped or changed round and for a length this sequence
        cannot be truncated to; INVALID_ARGUMENT for content that no round may have.
        """
        self._validate(asked)
        if self._last is not None and asked == self._last:
            return self._last_reply
        expected = 1 if self._last is None else self._last.round + 1
        legal = self._legal_base_lens
        if asked.round != expected or asked.base_len not in legal:
            raise FailedPrecondition(
                f"round {asked.round} with base_len {asked.base_len} does not follow: expected is round {expected} "
                f"with base_len {legal.start} to {legal.stop - 1}",
                reason="BASE_LEN_MISMATCH",
                metadata={
                    "round": str(asked.round),
                    "base_len": str(asked.base_len),
                    "expected_round": str(expected),
                    "min_base_len": str(legal.start),
                    "max_base_len": str(legal.stop - 1),
                },
            )
        return None

    def record(self, asked: Round, reply: Verified) -> None:
        """Notes a round that ran."""
        self._last, self._last_reply = asked, reply
        known = asked.base_len + len(asked.token_ids)
        self._legal_base_lens = range(known, known + len(asked.draft_token_ids) + 1)

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
