"""How much of a long piece of work fits a turn, learned from the turns before."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

# A first piece of so many rows times keys is worth about ten milliseconds of a CPU.
_FIRST_PRODUCT = 150_000


def first_rows(num_keys: int) -> int:
    """Returns how many rows that look at `num_keys` keys to begin with, before anything was timed."""
    return max(8, _FIRST_PRODUCT // max(1, num_keys))


class Pace:
    """Sizes of the next piece, in rows. With `is_fixed`, always the most: for work whose bits depend on its pieces."""

    def __init__(self, *, first: int, most: int, is_fixed: bool = False) -> None:
        self._first, self._most, self._is_fixed = min(first, most), most, is_fixed
        self._s_per_row: float | None = None
        self.total_s = 0.0

    def num_rows(self, turn_s: float, left: int) -> int:
        """Returns how many of `left` rows to do in a turn: at least one."""
        if self._is_fixed:
            return min(self._most, left)
        fitting = self._first if self._s_per_row is None else int(turn_s / self._s_per_row)
        return max(1, min(fitting, self._most, left))

    @contextmanager
    def piece(self, num_rows: int) -> Generator[None]:
        """Times a piece of `num_rows`."""
        before_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - before_s
        self.total_s += took_s
        self._s_per_row = took_s / num_rows
