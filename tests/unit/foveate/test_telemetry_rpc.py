"""Spans of calls: both sides, every arity, however they end (case G4)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags

from foveate.rpc.channel import open_channel, open_sync_channel
from foveate.rpc.errors import NotFound, Unavailable
from foveate.rpc.server import Server, ServiceRegistration, running
from foveate.telemetry import conventions as names
from foveate.telemetry.spans import MAX_SPANS, SpanLog, current_log, timed

SERVICE = "test.Traced"
EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def provider() -> None:
    """A process has one provider for ever; it records only what a caller sampled, so other tests do not notice."""
    made = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(made)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    EXPORTER.clear()
    return EXPORTER


class Handlers:
    """Echoes, fails and hangs as it is told."""

    def __init__(self) -> None:
        self.next_address = ""

    async def _do(self, request: bytes) -> bytes:
        if request == b"missing":
            raise NotFound("no such thing")
        if request == b"away":
            raise Unavailable("nobody is here")
        if request == b"hang":
            await asyncio.Event().wait()
        if request == b"onward":
            async with open_channel(self.next_address) as channel:
                return bytes(await channel.unary_unary(f"/{SERVICE}/unary")(b"there"))
        return request

    async def unary(self, request: bytes, context: Any) -> bytes:
        return await self._do(request)

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await self._do(request)

    async def by_hand(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(await self._do(request))

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "both": grpc.stream_stream_rpc_method_handler(self.both),
            "by_hand": grpc.stream_stream_rpc_method_handler(self.by_hand),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@pytest.fixture
async def address() -> AsyncIterator[str]:
    handlers = Handlers()
    async with running(
        Server([ServiceRegistration(SERVICE, handlers.add_to)], address="127.0.0.1:0"), grace_s=0
    ) as server:
        handlers.next_address = f"127.0.0.1:{server.port}"
        yield handlers.next_address


def caller(*, sampled: bool = True) -> NonRecordingSpan:
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else 0)
    return NonRecordingSpan(SpanContext(secrets.randbits(128), secrets.randbits(64), is_remote=True, trace_flags=flags))


async def ended(exporter: InMemorySpanExporter, number: int) -> list[ReadableSpan]:
    async with asyncio.timeout(5):
        while len(exporter.get_finished_spans()) < number:  # noqa: ASYNC110 - an exporter has no event
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    spans = list(exporter.get_finished_spans())
    assert len(spans) == number
    return spans


def status(span: ReadableSpan) -> tuple[int, bool]:
    assert span.attributes is not None
    return int(str(span.attributes[names.RPC_STATUS_NUMBER])), span.status.status_code is StatusCode.ERROR


async def test_a_call_has_a_span_on_each_side_and_calls_made_for_it_are_its_children(
    address: str, exporter: InMemorySpanExporter
) -> None:
    async with open_channel(address) as channel:
        with trace.use_span(caller()) as root:
            assert await channel.unary_unary(f"/{SERVICE}/unary")(b"onward") == b"there"
    spans = await ended(exporter, 4)
    assert {span.context.trace_id for span in spans if span.context} == {root.get_span_context().trace_id}
    by_id = {span.context.span_id: span for span in spans if span.context}
    (inner,) = [
        span
        for span in spans
        if span.context and not any(s.parent and s.parent.span_id == span.context.span_id for s in spans)
    ]
    kinds = []
    node: ReadableSpan | None = inner
    while node is not None and node.parent is not None:
        kinds.append(node.kind)
        parent_id = node.parent.span_id
        node = by_id.get(parent_id)
    assert kinds == [SpanKind.SERVER, SpanKind.CLIENT, SpanKind.SERVER, SpanKind.CLIENT]
    assert parent_id == root.get_span_context().span_id


@pytest.mark.parametrize("method", ["both", "by_hand"])
@pytest.mark.parametrize(("request_", "code", "server_is_error"), [(b"missing", 5, False), (b"away", 14, True)])
async def test_a_failed_stream_has_its_status_on_both_sides(
    address: str, exporter: InMemorySpanExporter, method: str, request_: bytes, code: int, server_is_error: bool
) -> None:
    async with open_channel(address) as channel:
        with trace.use_span(caller()):
            call = channel.stream_stream(f"/{SERVICE}/{method}")()
            await call.write(request_)
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
        spans = await ended(exporter, 2)
    assert {(span.kind, *status(span)) for span in spans} == {
        (SpanKind.CLIENT, code, True),
        (SpanKind.SERVER, code, server_is_error),
    }


@pytest.mark.parametrize("method", ["both", "by_hand"])
@pytest.mark.parametrize("last", [b"hang", b"echo"])
async def test_a_cancelled_stream_is_status_1_and_an_error(
    address: str, exporter: InMemorySpanExporter, method: str, last: bytes
) -> None:
    async with open_channel(address) as channel:
        with trace.use_span(caller()):
            call = channel.stream_stream(f"/{SERVICE}/{method}")()
            await call.write(b"first")
            assert await call.read() == b"first"
            await call.write(last)
            await asyncio.sleep(0.05)
            call.cancel()
        spans = await ended(exporter, 2)
    assert [status(span) for span in spans] == [(1, True), (1, True)]


async def test_a_deadline_is_status_4(address: str, exporter: InMemorySpanExporter) -> None:
    async with open_channel(address) as channel:
        with trace.use_span(caller()), pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/{SERVICE}/unary")(b"hang", timeout=0.1)
        spans = await ended(exporter, 2)
    assert [status(span) for span in spans] == [(4, True), (4, True)]


@pytest.mark.parametrize("sampled", [None, False])
async def test_what_nobody_samples_is_not_recorded_but_handed_on(
    address: str, exporter: InMemorySpanExporter, sampled: bool | None
) -> None:
    begin_ns = time.time_ns()  # spans of the test before may still be on their way
    async with open_channel(address) as channel:
        with trace.use_span(trace.INVALID_SPAN if sampled is None else caller(sampled=False)):
            assert await channel.unary_unary(f"/{SERVICE}/unary")(b"onward") == b"there"
    await asyncio.sleep(0.05)
    assert [span for span in exporter.get_finished_spans() if (span.start_time or 0) >= begin_ns] == []


async def test_the_sync_client_hands_its_trace_on(address: str, exporter: InMemorySpanExporter) -> None:
    def ask(parent: NonRecordingSpan) -> bytes:
        with open_sync_channel(address) as channel, trace.use_span(parent):
            return bytes(channel.unary_unary(f"/{SERVICE}/unary")(b"there"))

    root = caller()
    assert await asyncio.to_thread(ask, root) == b"there"
    (span,) = await ended(exporter, 1)
    assert span.parent is not None
    assert span.parent.span_id == root.get_span_context().span_id


async def test_a_logs_spans_are_made_with_the_times_they_were_written_with(exporter: InMemorySpanExporter) -> None:
    log = SpanLog(trace.set_span_in_context(caller()))
    for index in range(MAX_SPANS + 2):
        log.add("round", 1000 + index, 2000 + index, {"index": index})
    recording = trace.get_tracer("test").start_span("call", trace.set_span_in_context(caller()))
    log.close(recording)
    recording.end()
    await log.make()
    spans = exporter.get_finished_spans()
    assert [(span.start_time, span.end_time) for span in spans[1:3]] == [(1000, 2000), (1001, 2001)]
    assert len(spans) == MAX_SPANS + 1
    assert spans[0].attributes == {"foveate.spans.dropped": 2}


def test_without_a_recorded_call_work_runs_as_it_is() -> None:
    def work() -> None: ...

    assert current_log() is None
    assert timed("work", work) is work
