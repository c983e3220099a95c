"""Writing an answer's messages while the next round runs: it does not wait for the client's socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any


class Outbox:
    """Writes messages in order, one on its way at a time. Use as an async context manager.

    A client that reads slowly, or has gone, is noticed a message later. Leaving waits until the last one is written;
    leaving by a cancellation drops it.
    """

    def __init__(self, write: Callable[[Any], Awaitable[None]]) -> None:
        self._write = write
        self._writing: asyncio.Future[None] | None = None

    async def put(self, message: Any) -> None:
        """Starts to write a message once the one before is written; raises what writing that one raised."""
        await self._flush()
        self._writing = asyncio.ensure_future(self._write(message))

    async def _flush(self) -> None:
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def __aenter__(self) -> Outbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writing is None:
            return
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._writing.cancel()
        # What the answer raised is told, not that a message could no longer be written.
        await asyncio.gather(self._writing, return_exceptions=error is not None)
