"""Draft lengths on simulated devices: what pays is chosen, and what does not pay costs almost nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from gateway.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from gateway.values import Draft, Verified

MAX = 16
SETTLED = 64  # tokens after which a controller must have found its way
Acceptance = Callable[[int, int], float]  # of a place, at a number of tokens so far


@dataclass(frozen=True)
class Costs:
    """Microseconds."""

    draft: float
    verify: float
    verify_more: float
    drafted_overhead: float = 2500
    plain_overhead: float = 1200

    def of(self, length: int) -> float:
        overhead = self.drafted_overhead if length else self.plain_overhead
        return overhead + self.draft * length + self.verify + self.verify_more * length


SHORT = Costs(350, 2_000, 200)
LONG = Costs(1_500, 24_000, 600)
SLOW_DRAFTER = Costs(8_000, 10_000, 2_000)


def tokens_per_ms(
    make: Callable[[Callable[[], float]], DraftLength],
    costs: Costs,
    acceptance: Acceptance,
    *,
    seed: int = 0,
    stalled: float = 0.0,
) -> tuple[float, list[int]]:
    """Returns the speed once it is settled, and every length; times vary by 5 %, and a share is stalled: ten times."""
    rng = random.Random(seed)
    now_us, num_tokens, lengths, settled = 0.0, 0, list[int](), (0.0, 0)
    length = make(lambda: now_us / 1e6)

    def about(expected_us: float) -> int:
        stall = 10.0 if rng.random() < stalled else 1.0
        return int(expected_us * stall * rng.lognormvariate(0, 0.05))

    while num_tokens < 600:
        chosen = length.next(10_000)
        draft_us, verify_us = about(costs.draft * chosen), about(costs.verify + costs.verify_more * chosen)
        now_us += draft_us + verify_us + (costs.drafted_overhead if chosen else costs.plain_overhead)
        num_accepted = 0
        while num_accepted < chosen and rng.random() < acceptance(num_accepted, num_tokens):
            num_accepted += 1
        length.learn(Draft(tuple(range(chosen)), draft_us), Verified((0,) * (chosen + 1), verify_us), num_accepted)
        num_tokens += num_accepted + 1
        lengths.append(chosen)
        if settled == (0.0, 0) and num_tokens >= SETTLED:
            settled = now_us, num_tokens
    return (num_tokens - settled[1]) / (now_us - settled[0]) * 1e3, lengths


def mean_speed(make: Callable[[Callable[[], float]], DraftLength], costs: Costs, acceptance: Acceptance) -> float:
    return sum(tokens_per_ms(make, costs, acceptance, seed=seed)[0] for seed in range(4)) / 4


def adaptive(clock_s: Callable[[], float]) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(5, MAX, clock_s)


def fixed(number: int) -> Callable[[Callable[[], float]], DraftLength]:
    return lambda clock_s: FixedDraftLength(number)


@pytest.mark.parametrize("costs", [SHORT, LONG, SLOW_DRAFTER])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 0.97])
def test_it_is_near_the_best_fixed_length_and_never_far_below_plain_decoding(costs: Costs, share: float) -> None:
    speed = mean_speed(adaptive, costs, lambda place, num_tokens: share)
    lengths = (0, 1, 2, 4, 8, MAX)
    by_length = {length: mean_speed(fixed(length), costs, lambda place, num_tokens: share) for length in lengths}
    assert speed >= 0.97 * by_length[0]
    assert speed >= 0.9 * max(by_length.values())


def test_a_stalled_process_is_no_trend() -> None:
    _, lengths = tokens_per_ms(adaptive, LONG, lambda place, num_tokens: 0.97, stalled=0.05)
    assert sorted(lengths)[len(lengths) // 4] >= 8


@pytest.mark.parametrize("costs", [SHORT, LONG])
def test_it_finds_out_when_drafts_become_good(costs: Costs) -> None:
    _, lengths = tokens_per_ms(adaptive, costs, lambda place, num_tokens: 0.95 if num_tokens > 250 else 0.0)
    assert lengths[30:60].count(0) >= 25
    assert max(lengths[-5:]) >= 8


def test_it_stops_drafting_when_drafts_become_bad() -> None:
    _, lengths = tokens_per_ms(adaptive, SLOW_DRAFTER, lambda place, num_tokens: 0.0 if num_tokens > 200 else 0.97)
    assert lengths[-20:].count(0) >= 18


def test_a_place_behind_which_nothing_is_accepted_is_the_last() -> None:
    _, lengths = tokens_per_ms(adaptive, LONG, lambda place, num_tokens: 1.0 if place < 3 else 0.0)
    assert sorted(lengths[-30:])[15] in (3, 4)


def test_looking_for_something_better_costs_under_two_percent() -> None:
    for costs in (SHORT, LONG, SLOW_DRAFTER):
        _, lengths = tokens_per_ms(adaptive, costs, lambda place, num_tokens: 0.0)
        late = lengths[SETTLED:]
        assert any(late), "it looks"
        spent = sum(costs.of(length) - costs.of(0) for length in late)
        assert spent <= 0.02 * len(late) * costs.of(0)


@pytest.mark.parametrize("make", [adaptive, fixed(5)])
@pytest.mark.parametrize(("remaining", "expected"), [(100, 5), (6, 5), (5, 4), (2, 1), (1, 0), (0, 0)])
def test_a_draft_leaves_room_for_the_verifiers_token(
    make: Callable[[Callable[[], float]], DraftLength], remaining: int, expected: int
) -> None:
    assert make(lambda: 0.0).next(remaining) == expected


def test_rounds_that_cost_nothing_are_no_division_by_zero() -> None:
    length = AdaptiveDraftLength(5, MAX, lambda: 0.0)
    for _ in range(20):
        chosen = length.next(100)
        length.learn(Draft((1,) * chosen), Verified((1,) * (chosen + 1)), chosen)
    assert 0 <= length.next(100) <= MAX
