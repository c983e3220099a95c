"""Which verifier a question goes to: holders first, others when the holder is busy enough, never by chance."""

from __future__ import annotations

from gateway.routing import Candidate, ranked

KEYS = [f"contexts/{index:064x}" for index in range(400)]


def first(key: str, *candidates: Candidate, holders: tuple[str, ...] = (), fetch_ms: float | None = None) -> str:
    return ranked(key, candidates, holders=holders, fetch_ms=fetch_ms)[0].pool_id


def test_the_holder_is_asked_until_it_costs_more_than_fetching() -> None:
    def busy(num_open: int) -> str:
        return first(KEYS[0], Candidate("a", num_open, 100.0), Candidate("b", 0, 100.0), holders=("a",), fetch_ms=350.0)

    assert [busy(num_open) for num_open in range(6)] == ["a", "a", "a", "a", "b", "b"]


def test_whoever_cannot_get_the_context_comes_last() -> None:
    order = ranked(
        KEYS[0],
        [Candidate("a", 50, 500.0), Candidate("b"), Candidate("c", 2, 500.0)],
        holders=("a", "c"),
        fetch_ms=None,
    )
    assert [one.pool_id for one in order] == ["c", "a", "b"]


def test_of_two_holders_the_idler_one() -> None:
    busy, idle = Candidate("a", 3, 100.0), Candidate("b", 1, 100.0)
    assert all(first(key, busy, idle, holders=("a", "b")) == "b" for key in KEYS)


def test_equals_share_the_contexts_and_keep_them_when_one_leaves() -> None:
    three = [Candidate(name) for name in "abc"]
    before = {key: first(key, *three, fetch_ms=100.0) for key in KEYS}
    counts = [list(before.values()).count(name) for name in "abc"]
    assert min(counts) > len(KEYS) / 5
    after = {key: first(key, *three[:2], fetch_ms=100.0) for key in KEYS}
    assert all(after[key] == pool for key, pool in before.items() if pool != "c")
    assert before == {key: first(key, *reversed(three), fetch_ms=100.0) for key in KEYS}
