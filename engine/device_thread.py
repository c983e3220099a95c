"""The one thread that touches a device: work runs in order, and the event loop stays free to answer."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Runs functions one after the other in a dedicated thread."""

    def __init__(self, name: str = "device") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `fn` after all that was submitted before, with the caller's context variables; returns its result.

        Cancelling the caller does not stop `fn`, nor keep it from starting: what it frees will be freed.
        """
        return await asyncio.shield(asyncio.wrap_future(self.submit(fn, *args, **kwargs)))

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `run`, without waiting: for cleanup in code that may be cancelled itself."""
        context = contextvars.copy_context()
        return self._executor.submit(lambda: context.run(fn, *args, **kwargs))

    def close(self) -> None:
        """Waits for the work that was submitted and ends the thread; later submissions raise RuntimeError."""
        self._executor.shutdown(wait=True)
