"""The one thread that touches a device: work runs in order, and the event loop stays free to answer.

A round crosses to this thread and back twice, so the way is short: a queue there, a callback of the loop back. A pool's
futures, wrapped and shielded, cost twice as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Runs functions one after the other in a dedicated thread."""

    def __init__(self, name: str = "device") -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._num_submitted = 0
        self._num_done = 0  # written by the device thread only
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of functions that wait or run, as seen from any thread."""
        return max(0, self._num_submitted - self._num_done)

    @property
    def is_wanted(self) -> bool:
        """Whether a function waits for the one that is running to end."""
        return not self._work.empty()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `fn` after all that was submitted before, with the caller's context variables; returns its result.

        Cancelling the caller does not stop `fn`, nor keep it from starting: what it frees will be freed.
        """
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                result = self._count(context.run, fn, *args, **kwargs)
            except BaseException as error:
                _call_soon(loop, _fail, future, error)
            else:
                _call_soon(loop, _finish, future, result)

        self._put(work)
        return await future

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `run`, without waiting: for cleanup in code that may be cancelled itself."""
        context = contextvars.copy_context()
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled

        def work() -> None:
            try:
                result = self._count(context.run, fn, *args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(work)
        return future

    def close(self) -> None:
        """Waits for the work that was submitted and ends the thread; later submissions raise RuntimeError."""
        if not self._is_closed:
            self._is_closed = True
            self._work.put(None)
        self._thread.join()

    def _put(self, work: Callable[[], None]) -> None:
        if self._is_closed:
            raise RuntimeError("the device thread is closed")
        self._num_submitted += 1
        self._work.put(work)

    def _count(self, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            return run(*args, **kwargs)
        finally:
            self._num_done += 1

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # what it holds must not live until the next one comes


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(callback, *args)


def _finish(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # else its caller was cancelled
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
