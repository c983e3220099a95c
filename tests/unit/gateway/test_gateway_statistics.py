"""Statistics add up, whatever ended the answer."""

from __future__ import annotations

import pytest

from gateway.policies import ExactPolicy, Guards, LvspecPolicy, Memory, Policy
from gateway.statistics import Statistics
from gateway.values import AnswerStats, Draft, DraftMode, Measured, Verified
from tests.unit.gateway.words import PlainWords


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def add(
    stats: Statistics,
    drafted: tuple[int, ...],
    targets: tuple[int, ...],
    kept: int | None = None,
    policy: Policy | None = None,
) -> None:
    measured = Measured(relevance=tuple(1 - 0.1 * index for index in range(len(targets))))
    draft, verified = Draft(drafted, model_us=3000), Verified(targets, model_us=5000, measured=measured)
    decision = (policy or ExactPolicy()).decide(draft, verified, Memory())
    stats.add_round(draft, verified, decision, len(decision.tokens) if kept is None else kept)


def collect() -> AnswerStats:
    clock = Clock()
    stats = Statistics(clock)
    clock.now_s += 0.050
    stats.first_token(prefill_us=20_000)
    clock.now_s += 0.004
    stats.begin_rounds()
    clock.now_s += 0.010
    add(stats, (1, 2, 3), (1, 2, 9, 4))
    clock.now_s += 0.012
    add(stats, (1, 2, 3), (9, 2, 3, 4))
    clock.now_s += 0.009
    add(stats, (1, 2, 3), (1, 2, 3, 4), kept=2)
    clock.now_s += 0.001
    return stats.finish(DraftMode.SPARSE)


def test_counts() -> None:
    stats = collect()
    assert (stats.num_rounds, stats.num_draft_rounds, stats.num_draft_tokens) == (3, 3, 9)
    assert stats.num_accepted_tokens_per_pos == (2, 2)
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos) == 4
    assert stats.num_loose_tokens == 0
    assert stats.num_rounds_per_draft_length == (0, 0, 0, 3)


def test_times() -> None:
    stats = collect()
    assert stats.time_to_first_token_ms == pytest.approx(50)
    assert stats.prefill_ms == pytest.approx(20)
    assert (stats.draft_ms, stats.verify_ms) == (pytest.approx(9), pytest.approx(15))
    assert stats.decode_ms == pytest.approx(36)
    assert stats.overhead_ms == pytest.approx(36 - 9 - 15)
    assert stats.round_overhead_ms == pytest.approx((2, 4, 1))


def test_a_round_without_a_draft() -> None:
    stats = Statistics(Clock())
    add(stats, (), (4,))
    finished = stats.finish(DraftMode.OFF)
    assert (finished.num_rounds, finished.num_draft_rounds, finished.num_accepted_tokens_per_pos) == (1, 0, ())
    assert finished.num_rounds_per_draft_length == (1,)


def test_kept_mismatches_are_counted_up_to_the_end_of_the_answer() -> None:
    stats = Statistics(Clock())
    loose = LvspecPolicy(PlainWords(), lam=0.5, window=1, guards=Guards())
    # Strict: the first two. The first is shifted by one, the last two are loose.
    add(stats, (1, 2, 3, 4), (2, 2, 8, 9, 5), policy=loose)
    add(stats, (1, 2, 3, 4), (2, 2, 8, 9, 5), kept=3, policy=loose)
    finished = stats.finish(DraftMode.SPARSE)
    assert finished.num_accepted_tokens_per_pos == (2, 2, 2, 1)
    assert (finished.num_loose_tokens, finished.num_salvaged_tokens) == (3 + 2, 2)
