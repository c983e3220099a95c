"""The encoder says of spans what the library's own does."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from foveate.telemetry import conventions
from foveate.telemetry.exporting import encoded
from foveate.telemetry.spans import SpanLog

ATTRIBUTES: list[dict[str, Any]] = [
    {},
    {"int": 1, "float": 1.0, "true": True, "text": "ü" * 90},
    {"negative": -(2**63), "large": 2**63 - 1, "zero": 0, "empty": "", "nan": 0.5},
    {"many": ("a", "b"), "long": "x" * 40_000},
]


def provider() -> tuple[TracerProvider, InMemorySpanExporter]:
    made = TracerProvider(resource=Resource({"service.name": "here"}), shutdown_on_exit=False)
    kept = InMemorySpanExporter()
    made.add_span_processor(SimpleSpanProcessor(kept))
    return made, kept


def spans_of(request: Any) -> dict[bytes, Span]:
    """Returns the spans by id, each with the resource and the scope it came under."""
    found = {}
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                found[span.span_id] = (resource.resource, scope.scope, span)
    return found


@pytest.mark.parametrize("is_remote", [False, True])
def test_what_is_sent_is_what_the_library_sends(is_remote: bool) -> None:
    made, kept = provider()
    state = TraceState([("a", "b")])
    parents = [
        trace.set_span_in_context(NonRecordingSpan(SpanContext(7, 8, is_remote, TraceFlags(1), one)))
        for one in (None, state)
    ]
    for scope in ("one", "two"):
        tracer = made.get_tracer(scope)
        for parent in (*parents, None):
            for attributes in ATTRIBUTES:
                tracer.start_span("plain", parent, attributes=attributes, start_time=5).end(2**60)
            tracer.start_span("served", parent, kind=SpanKind.SERVER).end()
            failed = tracer.start_span("failed", parent)
            failed.add_event("it broke", {"why": "?"})
            failed.set_status(Status(StatusCode.ERROR, "broken"))
            failed.end()
    spans = kept.get_finished_spans()
    assert spans_of(encoded(spans)) == spans_of(encode_spans(spans))
    assert len(encoded(spans).resource_spans) == 2  # a part for each scope
    assert len(encoded(()).resource_spans) == 0


async def test_spans_that_are_written_down_are_children_of_the_calls_span(monkeypatch: pytest.MonkeyPatch) -> None:
    made, kept = provider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made)
    call = made.get_tracer(conventions.SCOPE).start_span("call")
    log = SpanLog(trace.set_span_in_context(call))
    for index in range(40):
        log.add("draft", index, index + 5, {"foveate.round": index})
    await log.make()
    spans: tuple[ReadableSpan, ...] = kept.get_finished_spans()
    told = call.get_span_context()
    assert [one.attributes for one in spans] == [{"foveate.round": index} for index in range(40)]
    assert len({one.context.span_id for one in spans}) == 40
    for one in spans:
        assert one.parent == told
        assert one.context.trace_id == told.trace_id
        assert one.context.trace_flags == told.trace_flags
        assert one.resource.attributes["service.name"] == "here"
        assert one.instrumentation_scope == call.instrumentation_scope  # type: ignore[attr-defined]
        assert one.end_time == (one.start_time or 0) + 5
    assert spans_of(encoded(spans)) == spans_of(encode_spans(spans))
