"""Where a context's keys and values came from, and what the other ways would have cost: equal in all services."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ContextSource(IntEnum):
    """Ways to a context, and forms in which it is kept; numbers are those of `foveate.v1.ContextSource`."""

    POOL = 1
    COLD_KV = 2
    COLD_EMBEDDINGS = 3
    MEDIA = 4
    COLD_KV_INT8 = 5


@dataclass(frozen=True)
class ContextCost:
    """What one way would take, as this verifier measured it."""

    source: ContextSource
    estimated_ms: float
    num_bytes: int = 0


@dataclass(frozen=True)
class ContextFetch:
    """How a verifier came by a context; `costs` of every way that was open, cheapest first."""

    source: ContextSource
    took_ms: float = 0.0
    costs: tuple[ContextCost, ...] = ()


FROM_POOL = ContextFetch(ContextSource.POOL)
FROM_MEDIA = ContextFetch(ContextSource.MEDIA)
