"""Compare-and-set: good, repeated, stale, skipped and impossible rounds (case S10)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foveate.rpc.errors import FailedPrecondition, InvalidArgument
from verifier_svc.round_guard import Round, RoundGuard, Verified

FIRST = Round("s", 1, 10, (7,), (1, 2, 3))
REPLY = Verified(1, 10, (1, 2, 9, 4), 5)


@pytest.fixture
def guard() -> RoundGuard:
    return RoundGuard(sequence_id="s", num_prompt_tokens=10, max_len=30, max_draft_tokens=4, vocab_size=100)


@pytest.fixture
def after_first(guard: RoundGuard) -> RoundGuard:
    assert guard.admit(FIRST) is None
    guard.record(FIRST, REPLY)
    return guard


def test_the_first_round_starts_at_the_prompt(guard: RoundGuard) -> None:
    for wrong in (
        replace(FIRST, base_len=9),
        replace(FIRST, base_len=11),
        replace(FIRST, round=2),
        replace(FIRST, round=0),
    ):
        with pytest.raises(FailedPrecondition) as caught:
            guard.admit(wrong)
        assert caught.value.reason == "BASE_LEN_MISMATCH"
    assert guard.admit(FIRST) is None


@pytest.mark.parametrize("base_len", [11, 12, 13, 14])
def test_any_number_of_accepted_drafts_may_stay(after_first: RoundGuard, base_len: int) -> None:
    assert after_first.admit(Round("s", 2, base_len, (9,), ())) is None


@pytest.mark.parametrize("base_len", [0, 9, 10, 15, 29])
def test_no_other_length_may(after_first: RoundGuard, base_len: int) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        after_first.admit(Round("s", 2, base_len, (9,), ()))
    assert caught.value.metadata["min_base_len"] == "11"
    assert caught.value.metadata["max_base_len"] == "14"


def test_a_repeated_round_has_the_same_reply(after_first: RoundGuard) -> None:
    assert after_first.admit(FIRST) is REPLY
    assert after_first.admit(FIRST) is REPLY
    second = Round("s", 2, 12, (9,), (5,))
    assert after_first.admit(second) is None
    after_first.record(second, replace(REPLY, round=2))
    for stale in (FIRST, replace(second, draft_token_ids=(6,)), replace(second, base_len=13), replace(second, round=4)):
        with pytest.raises(FailedPrecondition):
            after_first.admit(stale)


def test_a_refused_round_changes_nothing(after_first: RoundGuard) -> None:
    with pytest.raises(FailedPrecondition):
        after_first.admit(Round("s", 3, 12, (9,), ()))
    assert after_first.admit(FIRST) is REPLY
    assert after_first.admit(Round("s", 2, 12, (9,), ())) is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sequence_id": "t"}, "round.sequence_id"),
        ({"token_ids": ()}, "round.token_ids"),
        ({"draft_token_ids": (1,) * 5}, "round.draft_token_ids"),
        ({"draft_token_ids": (100,)}, "round.draft_token_ids"),
        ({"token_ids": (2**32 - 1,)}, "round.draft_token_ids"),
        ({"base_len": 28}, "round.base_len"),
        ({"token_ids": (1,) * 25}, "round.base_len"),
    ],
)
def test_content_no_round_may_have(guard: RoundGuard, change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        guard.admit(replace(FIRST, **change))  # type: ignore[arg-type]
    assert field in [violation.field for violation in caught.value.violations]
