"""Spans of a call, written down while it runs and made when it is over.

Making a span costs about 35 us, a tenth of which is writing down its times. A round has four of them in the gateway and
one on each device, so made on the spot they would slow every round that is recorded. A call's log keeps the times, and
its spans are made after the caller has the answer.

    interceptor  begins the call's span, sets the log          device thread   writes to the same log: context
    handler      log.add(name, start, end, ...)                                variables travel with the work
    afterwards   the spans, with the call's span (or the answer's) as parent
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from foveate.telemetry import conventions

Attributes = Mapping[str, str | bool | int | float]
P = ParamSpec("P")
T = TypeVar("T")

# More rounds than any answer should have; what is beyond is counted on the call's span, not kept.
MAX_SPANS = 8192
_SPANS_AT_ONCE = 8  # made between two turns of the event loop: about 0.3 ms
DROPPED = "foveate.spans.dropped"


@dataclass(frozen=True)
class _Written:
    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes


@dataclass
class SpanLog:
    """What one recorded call wrote down. Any thread may add; `parent` is the span the entries will be children of."""

    parent: Context
    _written: list[_Written] = field(default_factory=list)
    _num_dropped: int = 0

    def add(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """Writes a span down; times are of time.time_ns."""
        if len(self._written) < MAX_SPANS:
            self._written.append(_Written(name, start_ns, end_ns, attributes))
        else:
            self._num_dropped += 1

    def close(self, span: Span) -> None:
        """Says on the call's `span`, before it ends, how many spans had no room."""
        if self._num_dropped:
            span.set_attribute(DROPPED, self._num_dropped)

    async def make(self) -> None:
        """Makes the spans, a few at a time, so that other calls' rounds are not held up."""
        written, self._written = self._written, []
        tracer = trace.get_tracer(conventions.SCOPE)
        for index, one in enumerate(written):
            span = tracer.start_span(one.name, self.parent, start_time=one.start_ns, attributes=one.attributes)
            span.end(one.end_ns)
            if index % _SPANS_AT_ONCE == _SPANS_AT_ONCE - 1:
                await asyncio.sleep(0)


_LOG: ContextVar[SpanLog | None] = ContextVar("foveate_span_log", default=None)


def current_log() -> SpanLog | None:
    """Returns the log of the call that is being served; None when it is not recorded."""
    return _LOG.get()


def set_log(log: SpanLog) -> None:
    """Makes `log` the one of the current task and of what it starts. Never reset: a call's task ends with the call."""
    _LOG.set(log)


def write(name: str, start_ns: int, attributes: Attributes) -> None:
    """Writes down a span that ends now, when the call is recorded."""
    log = _LOG.get()
    if log is not None:
        log.add(name, start_ns, time.time_ns(), attributes)


def timed(name: str, fn: Callable[P, T], attributes: Attributes | None = None) -> Callable[P, T]:
    """Returns `fn`, or, when the call is recorded, `fn` writing down a span for the thread it will run in.

    The span begins when `fn` does; how long it waited since now is one of its attributes.
    """
    log = _LOG.get()
    if log is None:
        return fn
    asked_ns = time.time_ns()

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        start_ns = time.time_ns()
        try:
            return fn(*args, **kwargs)
        finally:
            queued_us = (start_ns - asked_ns) // 1000
            thread = threading.current_thread().name
            more: dict[str, str | int] = {conventions.QUEUED_US: queued_us, conventions.THREAD_NAME: thread}
            log.add(name, start_ns, time.time_ns(), {**(attributes or {}), **more})

    return call


class SpanMaker:
    """Makes the spans of calls that are over, in tasks of its own."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def make(self, log: SpanLog) -> None:
        """Makes a log's spans soon."""
        task = asyncio.create_task(log.make())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Waits until all are made."""
        await asyncio.gather(*self._tasks)
