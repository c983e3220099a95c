"""Counts and times of one answer.

What adds up, whatever ended the answer (tests/unit/gateway/test_gateway_statistics.py):

    num_accepted_tokens == sum(num_accepted_tokens_per_pos) <= num_draft_tokens
    num_salvaged_tokens <= num_loose_tokens <= num_accepted_tokens
    committed tokens    == 1 (the first) + num_accepted_tokens + one of the verifier's own per round;
                           the last round may have none, when the answer ended inside its draft
    num_rounds          == sum(num_rounds_per_draft_length)
    num_draft_tokens    == sum(k * num_rounds_per_draft_length[k])
    decode_ms           == draft_ms + verify_ms + overhead_ms

A draft token counts as accepted only if the answer kept it: what a round accepted behind the end of the answer does not
flatter the statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.policies import LOOSE_ORIGINS, Decision
from gateway.values import AnswerStats, Draft, DraftMode, Origin, Verified


class Statistics:
    """Collects what happens in an answer; made when the request arrives."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self._arrival_s = clock_s()
        self._first_token_s = self._arrival_s
        self._last_mark_s = self._arrival_s
        self._prefill_us = 0
        self._draft_us = 0
        self._verify_us = 0
        self._num_loose_tokens = 0
        self._num_salvaged_tokens = 0
        self._num_accepted_per_pos: list[int] = []
        self._num_rounds_per_draft_length: list[int] = []
        self._round_overhead_ms: list[float] = []

    def first_token(self, prefill_us: int) -> None:
        """Marks the moment the first token is known."""
        self._first_token_s = self._clock_s()
        self._prefill_us = prefill_us

    @property
    def time_to_first_token_s(self) -> float:
        """From the arrival of the request to the first token."""
        return self._first_token_s - self._arrival_s

    def begin_rounds(self) -> None:
        """Marks the start of round 1, when the drafter is ready."""
        self._last_mark_s = self._clock_s()

    def add_round(self, draft: Draft, verified: Verified, decision: Decision, num_kept: int) -> None:
        """Adds a finished round of which the answer kept `num_kept` tokens; the next round begins now."""
        num_accepted = min(decision.num_accepted, num_kept)
        missing = num_accepted - len(self._num_accepted_per_pos)
        self._num_accepted_per_pos.extend([0] * missing)
        for position in range(num_accepted):
            self._num_accepted_per_pos[position] += 1
        length = len(draft.token_ids)
        self._num_rounds_per_draft_length += [0] * (length + 1 - len(self._num_rounds_per_draft_length))
        self._num_rounds_per_draft_length[length] += 1
        kept = [token.origin for token in decision.tokens[:num_kept]]
        self._num_loose_tokens += sum(origin in LOOSE_ORIGINS for origin in kept)
        self._num_salvaged_tokens += kept.count(Origin.SALVAGED)
        self._add_times(draft.model_us, verified.model_us)

    def finish(self, draft_mode: DraftMode) -> AnswerStats:
        """Returns the statistics of the answer, which ends now."""
        decode_ms = (self._clock_s() - self._first_token_s) * 1e3
        draft_ms, verify_ms = self._draft_us / 1e3, self._verify_us / 1e3
        return AnswerStats(
            draft_mode=draft_mode,
            num_rounds=len(self._round_overhead_ms),
            num_draft_rounds=sum(self._num_rounds_per_draft_length[1:]),
            num_draft_tokens=sum(length * num for length, num in enumerate(self._num_rounds_per_draft_length)),
            num_accepted_tokens=sum(self._num_accepted_per_pos),
            num_accepted_tokens_per_pos=tuple(self._num_accepted_per_pos),
            num_loose_tokens=self._num_loose_tokens,
            num_salvaged_tokens=self._num_salvaged_tokens,
            time_to_first_token_ms=self.time_to_first_token_s * 1e3,
            prefill_ms=self._prefill_us / 1e3,
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            overhead_ms=decode_ms - draft_ms - verify_ms,
            decode_ms=decode_ms,
            round_overhead_ms=tuple(self._round_overhead_ms),
            num_rounds_per_draft_length=tuple(self._num_rounds_per_draft_length),
        )

    def _add_times(self, draft_us: int, verify_us: int) -> None:
        now_s = self._clock_s()
        duration_ms = (now_s - self._last_mark_s) * 1e3
        self._last_mark_s = now_s
        self._draft_us += draft_us
        self._verify_us += verify_us
        self._round_overhead_ms.append(duration_ms - (draft_us + verify_us) / 1e3)
