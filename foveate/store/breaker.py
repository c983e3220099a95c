"""A circuit breaker: after a failure nobody tries for a while, then one caller at a time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Closed: everybody may try. Open: nobody. After `period_s`: one caller tries, the others do not wait for it."""

    def __init__(self, period_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = period_s
        self._clock = clock
        self._retry_at_s: float | None = None
        self._is_trying = False
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether the last attempt failed."""
        return self._retry_at_s is not None

    def admits(self) -> bool:
        """Tells whether the caller may try now; whoever is admitted calls `succeeded`, `failed` or `abandoned`."""
        if self._retry_at_s is None:
            return True
        if self._is_trying or self._clock() < self._retry_at_s:
            return False
        self._is_trying = True
        return True

    def succeeded(self) -> None:
        """Closes the breaker."""
        self._retry_at_s = None
        self._is_trying = False

    def failed(self) -> None:
        """Opens the breaker for a period from now."""
        if self._retry_at_s is None:
            self.num_opened += 1
        self._retry_at_s = self._clock() + self._period_s
        self._is_trying = False

    def abandoned(self) -> None:
        """The attempt was given up by its caller and says nothing about the store."""
        self._is_trying = False
