"""What T should be: drafts that mismatch independently, of which a share need not match."""

from __future__ import annotations

from collections.abc import Sequence

from bench.evaluation.records import Record
from gateway.policies.lvspec import num_strict
from gateway.policies.relaxed import strictest

KEPT = ("accepted", "loose", "salvaged")


def mismatch_rate(exact: Sequence[Record], num_drafts: int) -> float:
    """Returns e0: how often a draft token differs from the target's choice, all before it being right.

    A round of an exact answer that does not accept all it drafted ends with one mismatch, except the last, which ends
    with the answer.
    """
    accepted = sum(record.num_accepted for record in exact)
    rejections = sum(max(0, record.num_draft_rounds - 1 - _num_full(record, num_drafts)) for record in exact)
    return rejections / (accepted + rejections) if accepted + rejections else 0.0


def _num_full(record: Record, num_drafts: int) -> int:
    """Rounds whose whole draft was accepted."""
    return record.accepted_per_pos[num_drafts - 1] if len(record.accepted_per_pos) >= num_drafts else 0


def expected_t(rate: float, lam: float, num_drafts: int) -> float:
    """Returns sum over j = 1..n of (1 - (1 - lambda) e0)^j."""
    return sum((1 - (1 - lam) * rate) ** place for place in range(1, num_drafts + 1))


def kept_per_round(record: Record) -> list[int]:
    """Returns how many draft tokens each round of an explained answer kept.

    The last round is left out: it ends with the answer, wherever the draft would have ended.
    """
    counts: dict[int, int] = {}
    for number, origin in zip(record.details["rounds"], record.details["origins"], strict=True):
        counts[number] = counts.get(number, 0) + (origin in KEPT)
    last = max(counts, default=0)
    return [count for number, count in counts.items() if 0 < number < last]


def rate_of_rounds(kept: Sequence[int], num_drafts: int) -> float:
    """Returns e0 of exact rounds that kept so many of `num_drafts` draft tokens each."""
    rejections = sum(count < num_drafts for count in kept)
    return rejections / (sum(kept) + rejections) if kept else 0.0


def rounds_of(record: Record) -> list[tuple[list[float], list[bool]]]:
    """Returns relevance and mismatch of the draft tokens of every round but the last of an explained answer."""
    by_round: dict[int, tuple[list[float], list[bool]]] = {}
    last = max(record.details["rounds"], default=0)
    for number, origin, relevance in zip(
        record.details["rounds"], record.details["origins"], record.details["relevance"], strict=True
    ):
        if origin in KEPT and number < last:
            scores, wrong = by_round.setdefault(number, ([], []))
            scores.append(relevance)
            wrong.append(origin != "accepted")
    return list(by_round.values())


def strict_mismatch_rate(rounds: Sequence[tuple[list[float], list[bool]]], lam: float) -> float:
    """Returns how often a draft token is both strict and a mismatch: (1 - lambda) e0 if relevance told nothing."""
    wrong_and_strict = total = 0
    for scores, wrong in rounds:
        strict = strictest(scores, num_strict(lam, len(scores)))
        wrong_and_strict += sum(one and other for one, other in zip(strict, wrong, strict=True))
        total += len(scores)
    return wrong_and_strict / total if total else 0.0


def t_of_rounds(rounds: Sequence[tuple[list[float], list[bool]]], lam: float) -> float:
    """Returns T when each of the rounds, as it was, is cut at its first strict mismatch."""
    kept = []
    for scores, wrong in rounds:
        strict = strictest(scores, num_strict(lam, len(scores)))
        rejected = [place for place, (one, other) in enumerate(zip(strict, wrong, strict=True)) if one and other]
        kept.append(rejected[0] if rejected else len(scores))
    return sum(kept) / len(kept) if kept else 0.0
