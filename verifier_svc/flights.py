"""Single flight: callers who want the same context at the same time share one job, which ends with the last of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from verifier_svc.progress import Progress, ProgressBoard

Result = TypeVar("Result")


class Flight(Generic[Result]):
    """One running job, its progress and how many callers wait for it."""

    def __init__(self, job: Callable[[ProgressBoard], Coroutine[Any, Any, Result]]) -> None:
        self._board = ProgressBoard()
        self.task: asyncio.Task[Result] = asyncio.create_task(job(self._board))
        self.task.add_done_callback(lambda _: self._board.close())
        self.num_callers = 0

    def progress(self, *, min_interval_s: float) -> AsyncIterator[Progress]:
        """Yields progress until the job ends, whichever way."""
        return self._board.watch(min_interval_s=min_interval_s)

    async def result(self) -> Result:
        """Returns the job's result or raises its error; a caller who is cancelled here does not end the job."""
        return await asyncio.shield(self.task)


class Flights(Generic[Result]):
    """The jobs that are running, by key. Used from the event loop only."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight[Result]] = {}
        self._tasks: set[asyncio.Task[Result]] = set()

    @property
    def num_running(self) -> int:
        """Number of jobs, cancelled ones that still clean up included."""
        return len(self._tasks)

    def is_running(self, key: str) -> bool:
        """Whether a job of `key` can be joined."""
        return key in self._flights

    def watch(self, key: str, *, min_interval_s: float) -> AsyncIterator[Progress] | None:
        """Returns the progress of a running job, for somebody who does not keep it running; None when there is none."""
        flight = self._flights.get(key)
        return None if flight is None else flight.progress(min_interval_s=min_interval_s)

    async def ended(self, key: str) -> None:
        """Waits until no job of `key` is running, however it ends."""
        while (flight := self._flights.get(key)) is not None:
            await asyncio.wait({flight.task})

    @contextlib.asynccontextmanager
    async def join(
        self, key: str, job: Callable[[ProgressBoard], Coroutine[Any, Any, Result]], *, on_done: Callable[[], None]
    ) -> AsyncIterator[Flight[Result]]:
        """Joins the job of `key`, starting it when there is none; the last caller to leave a running job cancels it.

        `on_done` is called when the caller's own inputs are needed no more: when its job has ended, or at once when
        another caller's job is joined.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = Flight(job)
            flight.task.add_done_callback(lambda task: self._landed(key, task))
            flight.task.add_done_callback(lambda _: on_done())
            self._tasks.add(flight.task)
        else:
            on_done()
        flight.num_callers += 1
        try:
            yield flight
        finally:
            flight.num_callers -= 1
            if flight.num_callers == 0 and not flight.task.done():
                self._forget(key, flight.task)
                flight.task.cancel()

    async def drain(self) -> None:
        """Cancels every job and waits until all have cleaned up."""
        for task in self._tasks:
            task.cancel()
        await _settle(self._tasks)

    def _landed(self, key: str, task: asyncio.Task[Result]) -> None:
        self._tasks.discard(task)
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # every caller may have left before the error came: it is theirs or nobody's

    def _forget(self, key: str, task: asyncio.Task[Result]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]


async def _settle(tasks: set[asyncio.Task[Any]]) -> None:
    waiting: list[Awaitable[Any]] = list(tasks)
    await asyncio.gather(*waiting, return_exceptions=True)
