"""The exact policy against its definition: what it commits is what plain decoding would have chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policies import Decision, ExactPolicy, Memory, guarantee_of
from gateway.values import Draft, Guarantee, Origin, Verified

token_ids = st.lists(st.integers(0, 3), max_size=16).map(tuple)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    drafted = draw(token_ids)
    targets = draw(st.lists(st.integers(0, 3), min_size=len(drafted) + 1, max_size=len(drafted) + 1))
    return drafted, tuple(targets)


def decide(drafted: tuple[int, ...], targets: tuple[int, ...]) -> Decision:
    return ExactPolicy().decide(Draft(drafted), Verified(targets), Memory())


@given(rounds())
def test_commits_the_targets_up_to_and_with_the_first_difference(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    drafted, targets = case
    decision = decide(drafted, targets)
    assert tuple(token.id for token in decision.tokens) == targets[: decision.num_accepted + 1]
    assert drafted[: decision.num_accepted] == targets[: decision.num_accepted]
    if decision.num_accepted < len(drafted):
        assert drafted[decision.num_accepted] != targets[decision.num_accepted]


@given(rounds())
def test_origins_say_where_each_token_came_from(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    drafted, targets = case
    *accepted, own = decide(drafted, targets).tokens
    assert all(token.origin is Origin.ACCEPTED for token in accepted)
    if not drafted:
        assert own.origin is Origin.PLAIN
    else:
        assert own.origin is (Origin.BONUS if len(accepted) == len(drafted) else Origin.RECOVERED)
    assert own.place.draft_token_id == (drafted[len(accepted)] if own.origin is Origin.RECOVERED else None)


@given(rounds(), token_ids)
def test_rejected_tokens_change_nothing(case: tuple[tuple[int, ...], tuple[int, ...]], other: tuple[int, ...]) -> None:
    drafted, targets = case
    num_accepted = decide(drafted, targets).num_accepted
    if num_accepted == len(drafted):
        return
    changed = (*drafted[: num_accepted + 1], *other)[: len(drafted)]
    assert decide(changed, targets[: len(changed) + 1]).num_accepted == num_accepted


@pytest.mark.parametrize(
    ("drafted", "targets", "expected"),
    [((), (5,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (1, 9, 3), 1), ((1, 2), (9, 2, 3), 0)],
)
def test_examples(drafted: tuple[int, ...], targets: tuple[int, ...], expected: int) -> None:
    assert decide(drafted, targets).num_accepted == expected


def test_an_answer_without_a_kept_mismatch_is_lossless() -> None:
    assert guarantee_of(0, is_context_lossy=False) is Guarantee.LOSSLESS
    assert guarantee_of(0, is_context_lossy=True) is Guarantee.LOSSY_CONTEXT
    assert guarantee_of(1, is_context_lossy=True) is Guarantee.LOOSE
