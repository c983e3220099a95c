"""How long to wait for a draft before the answer goes on without the drafter."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_TIMES_TYPICAL = 20
_WEIGHT_OF_NEWEST = 0.1


class Patience:
    """Twenty times what drafts usually take, and never less than a floor.

    Before anything is known it is twenty times the floor. Shared by all answers of a drafter, so that a drafter under
    load, which is slow for everybody, is waited for.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._typical_s: float | None = None

    @property
    def timeout_s(self) -> float:
        """How long to wait now."""
        typical_s = self._floor_s if self._typical_s is None else self._typical_s
        return max(self._floor_s, _TIMES_TYPICAL * typical_s)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Learns from the duration of the block, when it ends well."""
        start_s = time.perf_counter()
        yield
        duration_s = time.perf_counter() - start_s
        typical_s = duration_s if self._typical_s is None else self._typical_s
        self._typical_s = typical_s + _WEIGHT_OF_NEWEST * (duration_s - typical_s)
