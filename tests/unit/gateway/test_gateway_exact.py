"""The exact policy against its definition: what it commits is what plain decoding would have chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policies import ExactPolicy
from gateway.policies.exact import longest_matching_prefix
from gateway.values import Draft, Guarantee, Origin, Verified

token_ids = st.lists(st.integers(0, 3), max_size=16).map(tuple)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    drafted = draw(token_ids)
    targets = draw(st.lists(st.integers(0, 3), min_size=len(drafted) + 1, max_size=len(drafted) + 1))
    return drafted, tuple(targets)


@given(rounds())
def test_commits_the_targets_up_to_and_with_the_first_difference(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    drafted, targets = case
    decision = ExactPolicy().decide(Draft(drafted), Verified(targets))
    assert tuple(token.id for token in decision.tokens) == targets[: decision.num_accepted + 1]
    assert drafted[: decision.num_accepted] == targets[: decision.num_accepted]
    if decision.num_accepted < len(drafted):
        assert drafted[decision.num_accepted] != targets[decision.num_accepted]
    assert decision.num_loose == 0


@given(rounds())
def test_origins_say_where_each_token_came_from(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    drafted, targets = case
    *accepted, own = ExactPolicy().decide(Draft(drafted), Verified(targets)).tokens
    assert all(token.origin is Origin.ACCEPTED for token in accepted)
    if not drafted:
        assert own.origin is Origin.PLAIN
    else:
        assert own.origin is (Origin.BONUS if len(accepted) == len(drafted) else Origin.RECOVERED)


@given(rounds(), token_ids)
def test_rejected_tokens_change_nothing(case: tuple[tuple[int, ...], tuple[int, ...]], other: tuple[int, ...]) -> None:
    drafted, targets = case
    num_accepted = longest_matching_prefix(drafted, targets)
    if num_accepted == len(drafted):
        return
    changed = (*drafted[: num_accepted + 1], *other)[: len(drafted)]
    assert longest_matching_prefix(changed, targets) == num_accepted


@pytest.mark.parametrize(
    ("drafted", "targets", "expected"),
    [((), (5,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (1, 9, 3), 1), ((1, 2), (9, 2, 3), 0)],
)
def test_examples(drafted: tuple[int, ...], targets: tuple[int, ...], expected: int) -> None:
    assert ExactPolicy().decide(Draft(drafted), Verified(targets)).num_accepted == expected


def test_promises_losslessness() -> None:
    assert ExactPolicy().guarantee is Guarantee.LOSSLESS
