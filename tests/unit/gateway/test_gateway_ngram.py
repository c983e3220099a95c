"""Prompt lookup and draft lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.ngram import MAX_NGRAM, NgramIndex


def propose_slowly(ids: list[int], num_draft_tokens: int) -> tuple[int, ...]:
    """The definition: after the longest end of the ids that occurred before, its latest occurrence first."""
    for length in range(min(MAX_NGRAM, len(ids)), 0, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[-length:]:
                longer = ids[:]
                for _ in range(num_draft_tokens):
                    longer.append(longer[end + len(longer) - len(ids)])
                return tuple(longer[len(ids) :])
    return ()


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8), st.integers(0, 8))
def test_finds_what_the_definition_finds(parts: list[list[int]], num_draft_tokens: int) -> None:
    index, ids = NgramIndex(), []
    for part in parts:
        index.extend(part)
        ids += part
    assert index.propose(num_draft_tokens) == propose_slowly(ids, num_draft_tokens)


def test_longest_suffix_wins() -> None:
    index = NgramIndex([1, 2, 3, 4, 9, 3, 5, 1, 2, 3])
    assert index.propose(2) == (4, 9)


def test_unseen_end_gives_nothing() -> None:
    assert NgramIndex([1, 2, 3]).propose(5) == ()
    assert NgramIndex().propose(5) == ()


def test_a_loop_goes_on() -> None:
    assert NgramIndex([7, 8, 7, 8]).propose(5) == (7, 8, 7, 8, 7)
