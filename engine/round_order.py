"""Compare-and-set on a sequence's length: which rounds may run, and which only repeat an answer already given.

rows of the sequence     [0 ........ base_len)[token_ids)[drafts)
after the round          known good up to base_len + len(token_ids); up to len(drafts) more may be accepted
base_len of the next     anywhere in that last stretch: truncation is the rollback
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from foveate.rpc.errors import FailedPrecondition


class AnyRound(Protocol):
    """What every round says; two rounds are equal when all they say is."""

    @property
    def round(self) -> int:
        """Number of the round, from 1."""

    @property
    def base_len(self) -> int:
        """Tokens that stay before this round."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What was committed after them."""


RoundT = TypeVar("RoundT", bound=AnyRound)
ReplyT = TypeVar("ReplyT")


class RoundOrder(Generic[RoundT, ReplyT]):
    """The last round of one sequence, whose first one starts at `num_prompt_tokens`."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._legal_base_lens = range(num_prompt_tokens, num_prompt_tokens + 1)
        self._last: tuple[RoundT, ReplyT] | None = None

    def admit(self, asked: RoundT) -> ReplyT | None:
        """Returns the earlier reply of a repeated round, None when the round may run.

        Raises FailedPrecondition (BASE_LEN_MISMATCH) for a stale, skipped or changed round and for a length that this
        sequence cannot be truncated to.
        """
        if self._last is not None and asked == self._last[0]:
            return self._last[1]
        expected = 1 if self._last is None else self._last[0].round + 1
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

    def record(self, asked: RoundT, reply: ReplyT, *, num_draft_tokens: int) -> None:
        """Notes a round that ran, with as many drafts as may be accepted."""
        self._last = asked, reply
        known = asked.base_len + len(asked.token_ids)
        self._legal_base_lens = range(known, known + num_draft_tokens + 1)
