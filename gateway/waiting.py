"""Calls that wait while every verifier is away: a bounded queue, each until shortly before its caller's deadline.

a verifier is ready      the call goes on at once
one comes in time        it goes on then, in order of arrival
none comes               UNAVAILABLE with RetryInfo, a little before the deadline, so that the caller still hears it
the queue is full        UNAVAILABLE with RetryInfo at once
"""

from __future__ import annotations

import asyncio

from foveate.rpc.errors import Unavailable
from foveate.telemetry import conventions as names
from foveate.telemetry import metrics
from gateway.exchange import RETRY_AFTER_S

_MARGIN_S = 0.2  # for the refusal to reach the caller before its deadline passes there
_MARGIN = 0.1  # share of a short deadline
NO_VERIFIER = "NO_VERIFIER"


def no_verifier(message: str = "no verifier is ready") -> Unavailable:
    """Returns the error of a call that needs a verifier while there is none."""
    return Unavailable(message, reason=NO_VERIFIER, retry_after_s=RETRY_AFTER_S)


def patience_s(remaining_s: float | None, limit_s: float) -> float:
    """Returns how long a call may wait: until shortly before its deadline, without one `limit_s`."""
    if remaining_s is None:
        return limit_s
    return max(0.0, remaining_s - min(_MARGIN_S, _MARGIN * remaining_s))


class VerifierQueue:
    """Holds calls back while there is no verifier. Used from one event loop."""

    def __init__(self, *, max_waiting: int, limit_s: float) -> None:
        self._max_waiting = max_waiting
        self._limit_s = limit_s
        self._num_waiting = 0
        self._is_ready = asyncio.Event()
        self._refused = metrics.counter(names.METRIC_REFUSED, "Calls that were refused before they began")

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a verifier."""
        return self._num_waiting

    def set_ready(self, is_ready: bool) -> None:
        """Says whether there is a verifier now."""
        if is_ready:
            self._is_ready.set()
        else:
            self._is_ready.clear()

    async def wait(self, remaining_s: float | None) -> None:
        """Returns when there is a verifier. Raises Unavailable; may be cancelled while it waits."""
        if self._is_ready.is_set():
            return
        if self._num_waiting >= self._max_waiting:
            raise self._refusal(f"no verifier is ready, and {self._num_waiting} calls wait for one already")
        wait_s = patience_s(remaining_s, self._limit_s)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                await self._is_ready.wait()
        except TimeoutError:
            raise self._refusal(f"no verifier became ready within {wait_s:.1f} s") from None
        finally:
            self._num_waiting -= 1

    def _refusal(self, message: str) -> Unavailable:
        self._refused.add(1, {names.REASON: NO_VERIFIER})
        return no_verifier(message)
