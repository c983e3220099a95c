"""Loose policies against their definitions, for any draft, any choices of the target and anything measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policies import (
    Decision,
    ExactPolicy,
    FlyGatePolicy,
    FlyPolicy,
    Guards,
    LvspecPolicy,
    Memory,
    Policy,
    RandomPolicy,
    WordKind,
)
from gateway.policies.lvspec import num_strict
from gateway.policies.relaxed import is_shifted, strictest
from gateway.values import Draft, FlyVariant, Measured, Origin, RelevancePool, Verified
from tests.unit.gateway.words import PlainWords

Case = tuple[Draft, Verified]
WORDS = PlainWords()
OFF = Guards(special=False, numbers=False, negations=False)
UNIT = st.floats(0, 1)
POLICIES: list[Callable[[], Policy]] = [
    lambda: LvspecPolicy(WORDS, guards=OFF),
    lambda: LvspecPolicy(WORDS, pool=RelevancePool.RUNNING, window=0, guards=OFF),
    lambda: LvspecPolicy(WORDS, pool=RelevancePool.THRESHOLD, threshold=0.5, guards=OFF),
    lambda: RandomPolicy(WORDS, guards=OFF),
    lambda: FlyPolicy(WORDS, window=2, guards=OFF),
    lambda: FlyGatePolicy(WORDS, guards=OFF),
]


@st.composite
def cases(draw: st.DrawFn, max_size: int = 12) -> Case:
    drafted = draw(st.lists(st.integers(0, 3), max_size=max_size))
    num_places = len(drafted) + 1

    def values(of: st.SearchStrategy[float], number: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(of, min_size=number, max_size=number)))

    measured = Measured(
        relevance=values(st.floats(-1, 1), num_places),
        entropy=values(st.floats(0, 1.1), num_places),
        draft_log_probabilities=values(st.floats(-9, 0), len(drafted)),
        target_log_probabilities=values(st.floats(-9, 0), num_places),
    )
    targets = draw(st.lists(st.integers(0, 3), min_size=num_places, max_size=num_places))
    return Draft(tuple(drafted)), Verified(tuple(targets), measured=measured)


def decide(policy: Policy, case: Case, memory: Memory | None = None) -> Decision:
    return policy.decide(*case, memory or Memory())


def kept_mismatches(decision: Decision, case: Case) -> list[int]:
    draft, verified = case
    return [
        index for index in range(decision.num_accepted) if draft.token_ids[index] != verified.target_token_ids[index]
    ]


@pytest.mark.parametrize("make", POLICIES)
@given(case=cases())
def test_commits_a_prefix_of_the_draft_and_the_targets_token_after_it(make: Callable[[], Policy], case: Case) -> None:
    draft, verified = case
    decision = decide(make(), case)
    *accepted, own = decision.tokens
    assert tuple(token.id for token in accepted) == draft.token_ids[: decision.num_accepted]
    assert own.id == verified.target_token_ids[decision.num_accepted]
    for index, token in enumerate(accepted):
        target = verified.target_token_ids[index]
        is_match = token.id == target
        assert (token.origin is Origin.ACCEPTED) == is_match
        assert token.place.target_token_id == (None if is_match else target)
        assert token.place.relevance == verified.measured.relevance[index]
        named = verified.measured.target_log_probabilities if is_match else verified.measured.draft_log_probabilities
        assert token.place.log_probability == named[index]
        assert token.place.round == 1
    if decision.num_accepted < len(draft.token_ids):
        assert draft.token_ids[decision.num_accepted] != own.id
    assert decision == decide(make(), case)


@pytest.mark.parametrize("make", POLICIES)
@given(case=cases())
def test_never_keeps_less_than_the_exact_policy(make: Callable[[], Policy], case: Case) -> None:
    assert decide(make(), case).num_accepted >= decide(ExactPolicy(), case).num_accepted


@given(cases(), st.sampled_from(RelevancePool), st.integers(0, 5), st.lists(st.floats(-1, 1), max_size=9))
def test_lambda_0_is_the_exact_policy(case: Case, pool: RelevancePool, window: int, earlier: list[float]) -> None:
    memory = Memory(3, tuple(earlier))
    exact = decide(ExactPolicy(), case, memory).tokens
    assert decide(LvspecPolicy(WORDS, lam=0, pool=pool, window=window, guards=OFF), case, memory).tokens == exact
    assert decide(RandomPolicy(WORDS, lam=0, window=window, guards=OFF), case, memory).tokens == exact


@given(cases(), st.sampled_from((RelevancePool.PER_ROUND, RelevancePool.RUNNING)))
def test_lambda_1_without_guards_keeps_every_draft(case: Case, pool: RelevancePool) -> None:
    for policy in (LvspecPolicy(WORDS, lam=1, pool=pool, guards=OFF), RandomPolicy(WORDS, lam=1, guards=OFF)):
        assert decide(policy, case).num_accepted == len(case[0].token_ids)


@given(cases(), UNIT, UNIT)
def test_a_larger_lambda_never_keeps_less(case: Case, one: float, other: float) -> None:
    lower, higher = sorted((one, other))
    kept = [decide(LvspecPolicy(WORDS, lam=lam, window=0, guards=OFF), case).num_accepted for lam in (lower, higher)]
    assert kept[0] <= kept[1]


@given(cases(), UNIT, st.integers(0, 4))
def test_a_wider_window_never_keeps_less(case: Case, lam: float, window: int) -> None:
    kept = [
        decide(LvspecPolicy(WORDS, lam=lam, window=width, guards=OFF), case).num_accepted
        for width in (window, window + 1)
    ]
    assert kept[0] <= kept[1]


@given(cases(), UNIT)
def test_lvspec_keeps_what_is_not_among_the_most_relevant_or_is_only_shifted(case: Case, lam: float) -> None:
    draft, verified = case
    num_tokens = len(draft.token_ids)
    decision = decide(LvspecPolicy(WORDS, lam=lam, window=2, guards=OFF), case)
    relevance = verified.measured.relevance[:num_tokens]
    for index in range(num_tokens):
        num_more_relevant = sum(
            other > relevance[index] or (other == relevance[index] and place < index)
            for place, other in enumerate(relevance)
        )
        is_strict = num_more_relevant < num_strict(lam, num_tokens)
        may_stay = not is_strict or (lam > 0 and is_shifted(draft.token_ids, verified.target_token_ids, index, 2))
        is_match = draft.token_ids[index] == verified.target_token_ids[index]
        if index < decision.num_accepted:
            assert is_match or may_stay
            if not is_match:
                assert decision.tokens[index].origin is (Origin.SALVAGED if is_strict else Origin.LOOSE)
        elif index == decision.num_accepted:
            assert not is_match
            assert not may_stay


@pytest.mark.parametrize("lam", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("num_tokens", range(17))
def test_the_strict_share_is_rounded_up_and_not_by_an_error_of_rounding(lam: float, num_tokens: int) -> None:
    tenths = round(lam * 10)
    assert num_strict(lam, num_tokens) == math.ceil((10 - tenths) * num_tokens / 10)
    assert sum(strictest([0.5] * num_tokens, num_strict(lam, num_tokens))) == num_strict(lam, num_tokens)


@given(st.lists(cases(), min_size=1, max_size=4), UNIT)
def test_a_running_pool_counts_all_drafts_of_the_answer(rounds: list[Case], lam: float) -> None:
    policy = LvspecPolicy(WORDS, lam=lam, pool=RelevancePool.RUNNING, window=0, guards=OFF)
    memory, seen = Memory(), list[float]()
    for number, case in enumerate(rounds, start=1):
        draft, verified = case
        decision = decide(policy, case, memory)
        memory = decision.memory
        seen += verified.measured.relevance[: len(draft.token_ids)]
        assert memory == Memory(number, tuple(seen))
        is_strict = strictest(seen, num_strict(lam, len(seen)))[len(seen) - len(draft.token_ids) :]
        if lam > 0:
            assert not any(is_strict[index] for index in kept_mismatches(decision, case))


@given(cases(), st.floats(-1, 1))
def test_a_threshold_is_strict_from_there_on(case: Case, threshold: float) -> None:
    policy = LvspecPolicy(WORDS, pool=RelevancePool.THRESHOLD, threshold=threshold, window=0, guards=OFF)
    decision = decide(policy, case)
    relevance = case[1].measured.relevance
    assert all(relevance[index] < threshold for index in kept_mismatches(decision, case))
    if decision.num_accepted < len(case[0].token_ids):
        assert relevance[decision.num_accepted] >= threshold


@given(cases(), UNIT, st.integers(0, 99))
def test_random_relaxes_as_many_places_as_lvspec(case: Case, lam: float, seed: int) -> None:
    draft, verified = case
    num_tokens = len(draft.token_ids)
    everywhere_wrong = replace(verified, target_token_ids=(9,) * (num_tokens + 1))
    policy = RandomPolicy(WORDS, lam=lam, window=0, seed=seed, guards=OFF)
    loose = [
        policy.decide(draft, replace(everywhere_wrong, target_token_ids=_right_before(draft, index)), Memory())
        for index in range(num_tokens)
    ]
    num_loose = sum(decision.num_accepted > index for index, decision in enumerate(loose))
    assert num_loose == num_tokens - (num_strict(lam, num_tokens) if lam > 0 else num_tokens)


def _right_before(draft: Draft, index: int) -> tuple[int, ...]:
    """Choices of a target that differ from the draft at `index` only."""
    return (*draft.token_ids[:index], 99, *draft.token_ids[index + 1 :], 99)


def test_random_picks_other_places_in_other_rounds() -> None:
    case = Draft((1,) * 10), Verified((2,) * 11)
    policy = RandomPolicy(WORDS, lam=0.5, window=0, guards=OFF)
    lengths = {policy.decide(*case, Memory(number)).num_accepted for number in range(20)}
    assert len(lengths) > 1


@pytest.mark.parametrize("variant", list(FlyVariant))
@given(case=cases(), window=st.integers(1, 6), threshold=st.floats(0, 1.1))
def test_fly_keeps_a_doubted_mismatch_before_a_run_of_agreement(
    variant: FlyVariant, case: Case, window: int, threshold: float
) -> None:
    draft, verified = case
    decision = decide(FlyPolicy(WORDS, window, threshold, variant, OFF), case)
    num_following = window - (variant is FlyVariant.CODE)
    for index in range(min(decision.num_accepted + 1, len(draft.token_ids))):
        follows = range(index + 1, index + 1 + num_following)
        may_stay = (
            verified.measured.entropy[index] >= threshold
            and follows.stop <= len(draft.token_ids)
            and all(draft.token_ids[place] == verified.target_token_ids[place] for place in follows)
        )
        is_match = draft.token_ids[index] == verified.target_token_ids[index]
        assert (index < decision.num_accepted) == (is_match or may_stay)


def test_fly_at_ten_drafts_can_only_keep_the_first_mismatches() -> None:
    for variant, last in ((FlyVariant.CODE, 4), (FlyVariant.PAPER, 3)):
        for index in range(10):
            draft = Draft(tuple(range(10)))
            verified = Verified(_right_before(draft, index), measured=Measured(entropy=(1.0,) * 11))
            decision = FlyPolicy(WORDS, variant=variant, guards=OFF).decide(draft, verified, Memory())
            assert decision.num_accepted == (10 if index <= last else index)


@given(cases(), st.floats(0, 1.1))
def test_the_gate_alone_asks_for_doubt_only(case: Case, threshold: float) -> None:
    decision = decide(FlyGatePolicy(WORDS, threshold, OFF), case)
    entropy = case[1].measured.entropy
    assert all(entropy[index] >= threshold for index in kept_mismatches(decision, case))
    if decision.num_accepted < len(case[0].token_ids):
        assert entropy[decision.num_accepted] < threshold


@pytest.mark.parametrize(
    ("kind", "switch"),
    [(WordKind.SPECIAL, "special"), (WordKind.NUMBER, "numbers"), (WordKind.NEGATION, "negations")],
)
@given(case=cases())
def test_guards_reject_mismatches_of_their_kind_on_either_side(kind: WordKind, switch: str, case: Case) -> None:
    words = PlainWords({2: kind})
    on = replace(OFF, **{switch: True})
    draft, verified = case
    guarded = [LvspecPolicy(words, lam=1, guards=on), RandomPolicy(words, lam=1, guards=on)]
    guarded += [FlyGatePolicy(words, 0.0, on), FlyPolicy(words, 1, 0.0, guards=on)]
    for policy in guarded:
        decision = decide(policy, case)
        for index in range(min(decision.num_accepted + 1, len(draft.token_ids))):
            sides = draft.token_ids[index], verified.target_token_ids[index]
            assert (index < decision.num_accepted) == (sides[0] == sides[1] or 2 not in sides)


@given(cases(), st.integers(1, 4))
def test_a_run_of_kept_mismatches_is_capped(case: Case, most: int) -> None:
    decision = decide(LvspecPolicy(WORDS, lam=1, guards=replace(OFF, max_loose_run=most)), case)
    run = 0
    for token in decision.tokens[:-1]:
        run = run + 1 if token.origin is Origin.LOOSE else 0
        assert run <= most
    if decision.num_accepted < len(case[0].token_ids):
        assert run == most


@given(cases(), UNIT)
def test_unlikely_drafts_are_rejected(case: Case, least: float) -> None:
    policy = LvspecPolicy(WORDS, lam=1, guards=replace(OFF, min_probability=least))
    assert policy.signals.log_probabilities == (least > 0)
    likely = [math.exp(value) >= least for value in case[1].measured.draft_log_probabilities]
    assert all(likely[index] for index in kept_mismatches(decide(policy, case), case))


@pytest.mark.parametrize(
    ("drafted", "targets", "index", "window", "expected"),
    [
        ((1, 2, 3), (2, 9, 9, 9), 0, 1, True),  # the target's token is drafted one later
        ((1, 2, 3), (2, 9, 9, 9), 0, 0, False),
        ((1, 2, 3), (9, 9, 2, 9), 1, 1, True),  # the drafted token is the target's one later
        ((1, 2, 3), (9, 9, 9, 1), 0, 2, False),
        ((1, 2, 3), (9, 9, 9, 1), 0, 3, True),  # also after the end of the draft
        ((1, 2), (2, 1, 5), 1, 1, True),
    ],
)
def test_shifted(drafted: tuple[int, ...], targets: tuple[int, ...], index: int, window: int, expected: bool) -> None:
    assert is_shifted(drafted, targets, index, window) is expected
