"""How many tokens to draft in the next round: a fixed number, or the number that pays most by what was measured.

Tokens per second of a round with k draft tokens, everything on the right measured while the answer runs:

    E(k) = 1 + sum over j <= k of a_1 ... a_j         a_j: share of drafts accepted at place j, given those before
    rate(k) = E(k) / (overhead + k * draft_us + verify_us(k))

`verify_us(k)` is a line fitted to the block lengths seen. k = 0 is plain decoding; it is chosen where drafting does not
pay, and then a short draft is tried now and then, because what does not pay now may pay later in the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.values import Draft, Verified

_PRIOR_ACCEPTANCE, _PRIOR_WEIGHT = 0.8, 1.5  # of a place's acceptance, in drafts
_PRIOR_SLOPE_SHARE = 0.1  # of the cost of one row that each further row is thought to cost until more is seen
_PLAIN_OVERHEAD_SHARE = 0.5  # of a drafted round's overhead that a plain round has until one is seen: half the hops
_FADE = 0.95  # what a measurement weighs after one more
_OUTLIER = 3.0  # measurements count as at most so many times what was expected: a stalled process is no trend
_NUM_FIRST_DECISIONS, _ROUNDS_PER_DECISION = 8, 3
_WORTH_A_CHANGE, _SURE = 1.02, 1.04
_PROBE_LENGTH, _PROBE_SHARE = 2, 0.015  # of the time of plain rounds, that looking for something better may cost
_PROBE_FADE = 0.5  # of the acceptance seen before: a probe is there to find out that it has changed


class DraftLength(Protocol):
    """Chooses the draft length of each round."""

    def next(self, remaining: int) -> int:
        """Returns num_draft_tokens for an answer that has room for `remaining` more tokens."""

    def learn(self, draft: Draft, verified: Verified, num_accepted: int) -> None:
        """Takes in the round that has just ended: `num_accepted` of its draft tokens were accepted."""


@dataclass(frozen=True)
class FixedDraftLength:
    """Always the same length, clipped so that a fully accepted draft and the token after it still fit."""

    num_draft_tokens: int

    def next(self, remaining: int) -> int:
        """Returns the length, at most `remaining` - 1 and never negative."""
        return _clipped(self.num_draft_tokens, remaining)

    def learn(self, draft: Draft, verified: Verified, num_accepted: int) -> None:
        """Learns nothing."""


class AdaptiveDraftLength:
    """The length with the best rate, from 0 to `max_draft_tokens`; the first round drafts `first`."""

    def __init__(self, first: int, max_draft_tokens: int, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._max = max_draft_tokens
        self._best = self._longest = first
        self._clock_s = clock_s
        self._round_began_s = 0.0
        self._acceptance = _Acceptance(max_draft_tokens)
        self._verify_us = _Line(prior_slope_share=_PRIOR_SLOPE_SHARE)
        self._draft_us = _Mean()
        self._drafted_overhead_us, self._plain_overhead_us = _Mean(), _Mean()
        self._num_rounds = 0
        self._next_probe = 0
        self._is_probe = False

    def next(self, remaining: int) -> int:
        """Returns the length, at most `remaining` - 1 and never negative."""
        self._round_began_s = self._clock_s()
        self._is_probe = self._best == 0 and self._num_rounds >= self._next_probe
        return _clipped(min(_PROBE_LENGTH, self._max) if self._is_probe else self._best, remaining)

    def learn(self, draft: Draft, verified: Verified, num_accepted: int) -> None:
        """Takes in a round; decides anew every few rounds."""
        num_drafted = len(draft.token_ids)
        took_us = (self._clock_s() - self._round_began_s) * 1e6
        overhead_us = max(0.0, took_us - draft.model_us - verified.model_us)
        (self._drafted_overhead_us if num_drafted else self._plain_overhead_us).add(overhead_us)
        self._verify_us.add(num_drafted, verified.model_us)
        if num_drafted:
            self._draft_us.add(draft.model_us / num_drafted)
            self._acceptance.add(num_drafted, num_accepted, fade=_PROBE_FADE if self._is_probe else _FADE)
        self._num_rounds += 1
        is_due = self._num_rounds <= _NUM_FIRST_DECISIONS or self._num_rounds % _ROUNDS_PER_DECISION == 0
        if self._draft_us.weight and (is_due or self._is_probe):
            self._decide()

    def _decide(self) -> None:
        was_off = self._best == 0
        self._longest = max(self._longest, self._best)
        # Costs and acceptance of drafts up to twice as long as any so far are a guess that is good enough to try.
        best = max(range(min(self._max, 2 * self._longest) + 1), key=self._rate)
        if self._rate(best) > _WORTH_A_CHANGE * self._rate(self._best):
            self._best = best
        if self._best == 0 and (self._is_probe or not was_off):
            plain_us = self._cost_us(0)
            self._next_probe = self._num_rounds + int(
                (self._cost_us(_PROBE_LENGTH) - plain_us) / plain_us / _PROBE_SHARE
            )

    def _rate(self, length: int) -> float:
        """Tokens per microsecond. What plain decoding gives is sure, so a draft has to promise more."""
        expected = self._acceptance.tokens(length) / self._cost_us(length)
        return expected if length else _SURE * expected

    def _cost_us(self, length: int) -> float:
        drafted_us, plain_us = self._drafted_overhead_us, self._plain_overhead_us
        if length:
            overhead_us = drafted_us.value
        else:
            overhead_us = plain_us.value if plain_us.weight else _PLAIN_OVERHEAD_SHARE * drafted_us.value
        return 1.0 + overhead_us + length * self._draft_us.value + self._verify_us.at(length)


def _clipped(length: int, remaining: int) -> int:
    return max(0, min(length, remaining - 1))


class _Mean:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.value = 0.0
        self.weight = 0.0

    def add(self, value: float) -> None:
        if self.weight:
            value = min(value, _OUTLIER * self.value)
        self.weight = _FADE * self.weight + 1.0
        self.value += (value - self.value) / self.weight


class _Line:
    """Least squares that forget, pulled towards a slope that is a small share of the height at 0."""

    def __init__(self, *, prior_slope_share: float) -> None:
        self._prior = prior_slope_share
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        if self._n:
            y = min(y, _OUTLIER * self.at(x))
        self._n, self._x, self._y = _FADE * self._n + 1, _FADE * self._x + x, _FADE * self._y + y
        self._xx, self._xy = _FADE * self._xx + x * x, _FADE * self._xy + x * y

    def at(self, x: float) -> float:
        if not self._n:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        prior_slope = self._prior * mean_y / (1.0 + self._prior * mean_x)
        spread = max(0.0, self._xx - self._n * mean_x * mean_x)
        covered = self._xy - self._n * mean_x * mean_y
        # The prior counts as two measurements that are one token apart.
        slope = max(0.0, (covered + prior_slope) / (spread + 1.0))
        return max(0.0, mean_y + slope * (x - mean_x))


class _Acceptance:
    """Acceptance by place, each drawn towards the one before it where little was seen."""

    def __init__(self, num_places: int) -> None:
        self._seen = [_PRIOR_WEIGHT] + [0.0] * (num_places - 1)
        self._accepted = [_PRIOR_WEIGHT * _PRIOR_ACCEPTANCE] + [0.0] * (num_places - 1)

    def add(self, num_drafted: int, num_accepted: int, *, fade: float) -> None:
        for place in range(min(num_drafted, num_accepted + 1)):
            self._seen[place] = fade * self._seen[place] + 1.0
            self._accepted[place] = fade * self._accepted[place] + (place < num_accepted)

    def tokens(self, length: int) -> float:
        """Returns E(length), the tokens that a round is expected to commit."""
        total, all_so_far = 1.0, 1.0
        before = self._accepted[0] / self._seen[0]
        for place in range(length):
            before = (self._accepted[place] + _PRIOR_WEIGHT * before) / (self._seen[place] + _PRIOR_WEIGHT)
            all_so_far *= before
            total += all_so_far
        return total
