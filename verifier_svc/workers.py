"""Blocking iterators driven from the event loop: one item ahead, in worker threads, always closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import Executor
from typing import Any, TypeVar

Item = TypeVar("Item")
_END: Any = object()


async def iterate_in_worker(executor: Executor, items: Generator[Item, None, None]) -> AsyncGenerator[Item, None]:
    """Yields what `items` yields; each step runs in `executor`, the next one while the caller works on this one.

    Leaving early, also by cancellation, waits for the running step and closes the generator, so that what it holds
    (a decoder on a file) is released before the caller releases the file. Use with contextlib.aclosing.
    """
    loop = asyncio.get_running_loop()
    step: asyncio.Future[Item] = loop.run_in_executor(executor, next, items, _END)
    try:
        while (item := await asyncio.shield(step)) is not _END:
            step = loop.run_in_executor(executor, next, items, _END)
            yield item
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait([step])
            step.exception()
        await loop.run_in_executor(executor, items.close)
