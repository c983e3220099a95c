"""One span per call on both sides, and the caller's trace context (W3C) handed on.

The published instrumentation of grpc.aio records cancelled calls, deadlines and exceptions as OK, breaks handlers that
read and write by themselves, and puts a queue between a client and its stream. Here:

    server   an interceptor around the whole handler, also around one that streams: its cancellation is seen
    client   a channel that adds metadata when a call begins and looks at the status when it is over; reads and writes
             of a stream go straight to gRPC, so a round costs nothing more
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import grpc
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from foveate.rpc.wrapping import Continuation, Handler, ServicerContext, rewrapped
from foveate.telemetry import conventions
from foveate.telemetry.spans import SpanLog, SpanMaker, current_log, set_log

Metadata = tuple[tuple[str, str | bytes], ...]
_UNTRACED = ("/grpc.health.", "/grpc.reflection.")
# When a caller cancels, its requests end shortly before the call is cancelled. A handler that stops at the end of
# its requests would be recorded as a success.
_CANCEL_FOLLOWS_S = 0.005
# A caller's deadline passes a little before the server's copy of it, and then reaches the server as a cancellation.
_SKEW_S = 0.1
# What a caller at fault is told is no error of the server; a cancelled call is marked, so that it is seen.
_NO_ERROR_OF_SERVER = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


class TracingInterceptor(grpc.aio.ServerInterceptor):
    """Makes every call but health and reflection a span whose parent is the caller's; it stays current in the handler.

    A call has a task of its own, so its context variables are set and never reset: nothing can be detached elsewhere.
    """

    def __init__(self, maker: SpanMaker) -> None:
        self._maker = maker
        self._tracer = trace.get_tracer(conventions.SCOPE)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(_UNTRACED):
            return handler
        return rewrapped(
            handler,
            unary=lambda inner: self._unary(inner, method),
            streaming=lambda inner: self._streaming(inner, method),
        )

    def _unary(self, inner: Any, method: str) -> Callable[[Any, ServicerContext], Awaitable[Any]]:
        async def call(request: Any, context: ServicerContext) -> Any:
            with self._span(method, context):
                return await inner(request, context)

        return call

    def _streaming(self, inner: Any, method: str) -> Callable[[Any, ServicerContext], Awaitable[None]]:
        # Writes rather than yields: a cancellation arrives inside the span, not at a generator that nobody resumes.
        async def call(request: Any, context: ServicerContext) -> None:
            with self._span(method, context):
                async with contextlib.aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)
                if current_log() is not None:
                    await asyncio.sleep(_CANCEL_FOLLOWS_S)

        return call

    @contextlib.contextmanager
    def _span(self, method: str, context: ServicerContext) -> Iterator[None]:
        parent = propagate.extract(_carrier(context.invocation_metadata()))
        span = self._tracer.start_span(method[1:], parent, kind=SpanKind.SERVER, attributes=_rpc_attributes(method))
        current = trace.set_span_in_context(span, parent)
        otel_context.attach(current)
        if not span.is_recording():
            yield
            return
        log = SpanLog(current)
        set_log(log)
        try:
            yield
        except BaseException as error:
            _set_status(span, _code_of(context, error), is_server=True)
            raise
        else:
            _set_status(span, grpc.StatusCode.OK, is_server=True)
        finally:
            log.close(span)
            span.end()
            self._maker.make(log)


class TracedChannel(grpc.aio.Channel):
    """A channel whose calls carry `metadata` and the current trace, of which they are spans."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        self._channel = channel
        self._metadata = metadata

    async def __aenter__(self) -> TracedChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._channel.__aexit__(*exc_info)

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel below."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the state of the channel below."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for the channel below."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits for the channel below."""
        await self._channel.channel_ready()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Returns a traced multi-callable."""
        return _traced(method, self._channel.unary_unary(method, *args, **kwargs), self._metadata)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Returns a traced multi-callable."""
        return _traced(method, self._channel.unary_stream(method, *args, **kwargs), self._metadata)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Returns a traced multi-callable."""
        return _traced(method, self._channel.stream_unary(method, *args, **kwargs), self._metadata)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Returns a traced multi-callable."""
        return _traced(method, self._channel.stream_stream(method, *args, **kwargs), self._metadata)


def _traced(method: str, begin: Callable[..., Any], always: Metadata) -> Callable[..., Any]:
    def call(*args: Any, metadata: Metadata | None = None, **kwargs: Any) -> Any:
        carried = (*always, *(metadata or ()))
        current = trace.get_current_span()
        told = current.get_span_context()
        if not told.is_valid or method.startswith(_UNTRACED):
            return begin(*args, metadata=carried, **kwargs)
        if not (told.trace_flags.sampled or current.is_recording()):
            # Decided for the whole trace: handed on as it is, without a span that nobody would see.
            return begin(*args, metadata=carried + trace_metadata(), **kwargs)
        tracer = trace.get_tracer(conventions.SCOPE)
        span = tracer.start_span(method[1:], kind=SpanKind.CLIENT, attributes=_rpc_attributes(method))
        carried += trace_metadata(trace.set_span_in_context(span))
        started = begin(*args, metadata=carried, **kwargs)
        if span.is_recording():
            started.add_done_callback(lambda done: asyncio.ensure_future(_end(span, done, time.time_ns())))
        return started

    return call


class CarryingInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """The sync client's side: calls carry `metadata` and the current trace. Makes no spans: the caller has its own."""

    def __init__(self, metadata: Metadata = ()) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._carrying(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._carrying(client_call_details), request)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._carrying(client_call_details), request_iterator)

    def _carrying(self, details: Any) -> _CallDetails:
        metadata = (*(details.metadata or ()), *self._metadata, *trace_metadata())
        return _CallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready, details.compression
        )


class _CallDetails(NamedTuple):
    method: str
    timeout: float | None
    metadata: Metadata
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


def trace_metadata(context: Context | None = None) -> Metadata:
    """Returns the metadata that makes a call a part of the current trace (or of `context`'s); none outside of one."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return tuple(carrier.items())


async def _end(span: Span, call: Any, end_ns: int) -> None:
    _set_status(span, await call.code(), is_server=False)
    span.end(end_ns)


def _set_status(span: Span, code: grpc.StatusCode, *, is_server: bool) -> None:
    span.set_attribute(conventions.RPC_STATUS, code.name)
    span.set_attribute(conventions.RPC_STATUS_NUMBER, int(code.value[0]))
    if code not in (_NO_ERROR_OF_SERVER if is_server else (grpc.StatusCode.OK,)):
        span.set_attribute(conventions.ERROR_TYPE, code.name)
        span.set_status(Status(StatusCode.ERROR, code.name))


def _code_of(context: ServicerContext, error: BaseException) -> grpc.StatusCode:
    """Returns the status a call that ended with `error` has."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        remaining_s = context.time_remaining()
        is_late = remaining_s is not None and remaining_s < _SKEW_S
        return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    numbers = {one.value[0]: one for one in grpc.StatusCode}
    return numbers.get(code, grpc.StatusCode.UNKNOWN) if code else grpc.StatusCode.UNKNOWN


def _rpc_attributes(method: str) -> dict[str, str]:
    return {conventions.RPC_SYSTEM: "grpc", conventions.RPC_METHOD: method[1:]}


def _carrier(metadata: Any) -> dict[str, str]:
    """Returns the text entries of a call's metadata."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}
