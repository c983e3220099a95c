"""Spans of a call, written down while it runs and made when it is over.

A round has four spans in the gateway and one on each device: made on the spot, at 35 us each, they would slow every
round that is recorded; writing down their times takes a tenth of that. A call's log keeps the times, and its spans are
made after the caller has the answer.

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
from typing import NamedTuple, ParamSpec, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext

from foveate.telemetry import conventions

Attributes = Mapping[str, str | bool | int | float]
UNTOLD: Attributes = {}  # of a span that nobody records
P = ParamSpec("P")
T = TypeVar("T")

# More rounds than any answer should have; what is beyond is counted on the call's span, not kept.
MAX_SPANS = 8192
_SPANS_AT_ONCE = 16  # made between two turns of the event loop: about 0.1 ms
_SPANS_BEFORE_PAUSE = 256
_PAUSE_S = 0.02
DROPPED = "foveate.spans.dropped"


class _Written(NamedTuple):
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
        make = _maker(self.parent)
        for index, one in enumerate(written, 1):
            make(one)
            if index % _SPANS_AT_ONCE == 0:
                # A pause now and then: spans made faster than they are sent would be dropped from the exporter's queue.
                await asyncio.sleep(0 if index % _SPANS_BEFORE_PAUSE else _PAUSE_S)


def _maker(parent: Context) -> Callable[[_Written], None]:
    """Returns what makes a span below `parent`.

    A span of the SDK is built to be changed while it lives, under a lock; ours are over when they are made. So they are
    handed to the parent's processor as what it hands on, which costs a tenth. Their parent is recorded, hence are they.
    """
    above = trace.get_current_span(parent)
    processor, ids = getattr(above, "_span_processor", None), getattr(trace.get_tracer_provider(), "id_generator", None)
    if processor is None or ids is None:
        tracer = trace.get_tracer(conventions.SCOPE)
        return lambda one: tracer.start_span(one.name, parent, start_time=one.start_ns, attributes=one.attributes).end(
            one.end_ns
        )
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace import Span as SdkSpan

    assert isinstance(above, SdkSpan)
    told = above.get_span_context()

    def make(one: _Written) -> None:
        context = SpanContext(told.trace_id, ids.generate_span_id(), False, told.trace_flags, told.trace_state)
        span = ReadableSpan(
            one.name,
            context,
            told,
            above.resource,
            one.attributes,
            start_time=one.start_ns,
            end_time=one.end_ns,
            instrumentation_scope=above.instrumentation_scope,
        )
        processor.on_end(span)

    return make


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
