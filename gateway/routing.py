"""Which verifier answers: whoever holds the context, unless it is so busy that another one would be sooner.

    expected wait = open answers x what one costs the others there + what getting the context would take there

Among equals, rendezvous hashing keeps a context's questions together: every gateway picks the same verifier, and one
verifier more or less moves only its own share.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# A verifier that would have to make the context from nothing it has cannot answer at all; it comes last.
_UNKNOWN_FETCH_MS = 1e6


@dataclass(frozen=True)
class Candidate:
    """A verifier that could answer: its pool, how many answers it has open, and what each costs a newcomer."""

    pool_id: str
    num_open: int = 0
    answer_ms: float = 0.0


def ranked(
    key: str, candidates: Iterable[Candidate], *, holders: Collection[str], fetch_ms: float | None
) -> list[Candidate]:
    """Returns the candidates, the best first."""
    away_ms = _UNKNOWN_FETCH_MS if fetch_ms is None else fetch_ms

    def rank(candidate: Candidate) -> tuple[float, float]:
        expected_ms = candidate.num_open * candidate.answer_ms
        expected_ms += 0.0 if candidate.pool_id in holders else away_ms
        return expected_ms, -rendezvous_weight(key, candidate.pool_id)

    return sorted(candidates, key=rank)


def rendezvous_weight(key: str, pool_id: str) -> float:
    """Returns a number in (0, inf) that every gateway computes alike."""
    digest = hashlib.blake2b(f"{len(key)}:{key}{pool_id}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
    return -1.0 / math.log(uniform)
