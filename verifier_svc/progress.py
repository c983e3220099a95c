"""Progress of a long job: the newest state of each stage, handed to any number of watchers at their own pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum, auto


class Stage(Enum):
    """Stages of making a context, in order."""

    UPLOAD = auto()
    DECODE = auto()
    ENCODE = auto()
    PREFILL = auto()


@dataclass(frozen=True)
class Progress:
    """How far a stage is, in its own units; total 0: unknown."""

    stage: Stage
    done: int
    total: int


class ProgressBoard:
    """Written by the job, read by watchers; both on the event loop."""

    def __init__(self) -> None:
        self._newest: dict[Stage, Progress] = {}
        self._changed: set[asyncio.Event] = set()
        self._is_closed = False

    def report(self, stage: Stage, done: int, total: int) -> None:
        """Records the newest state of a stage."""
        self._newest[stage] = Progress(stage, done, total)
        self._wake()

    def close(self) -> None:
        """Ends every watcher after it has seen the newest state."""
        self._is_closed = True
        self._wake()

    async def watch(self, *, min_interval_s: float) -> AsyncIterator[Progress]:
        """Yields the newest state of each stage that changed, at most once per interval, until the job ends."""
        changed = asyncio.Event()
        changed.set()
        seen: dict[Stage, Progress] = {}
        self._changed.add(changed)
        try:
            while True:
                await changed.wait()
                changed.clear()
                is_last = self._is_closed
                for stage in Stage:
                    newest = self._newest.get(stage)
                    if newest is not None and seen.get(stage) != newest:
                        seen[stage] = newest
                        yield newest
                if is_last:
                    return
                await self._pause(min_interval_s)
        finally:
            self._changed.discard(changed)

    async def _pause(self, interval_s: float) -> None:
        """Sleeps for the interval, less when the job ends in it."""
        ended = asyncio.Event()
        self._changed.add(ended)
        try:
            async with asyncio.timeout(interval_s):
                while not self._is_closed:
                    await ended.wait()
                    ended.clear()
        except TimeoutError:
            return
        finally:
            self._changed.discard(ended)

    def _wake(self) -> None:
        for event in self._changed:
            event.set()
