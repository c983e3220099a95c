"""A real OTLP receiver: gRPC's TraceService and MetricsService, as a collector has them, keeping what arrives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came over the wire."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    duration_ms: float


@dataclass
class Receiver:
    """What arrived so far."""

    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    metric_names: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """Returns the spans by trace."""
        found: dict[str, list[ReceivedSpan]] = {}
        with self._lock:
            for span in self.spans:
                found.setdefault(span.trace_id, []).append(span)
        return found

    def environment(self, **more: str) -> dict[str, str]:
        """Returns the standard variables that send everything here, soon."""
        told = {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        return {**told, "OTEL_METRIC_EXPORT_INTERVAL": "500", **more}

    def take_spans(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans.extend(_span(service, span) for span in scope.spans)

    def take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    self.metric_names.update(metric.name for metric in scope.metrics)


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Serves a receiver on a free port of the loopback."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(4))

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            receiver.take_spans(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            receiver.take_metrics(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()


def _span(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        is_error=span.status.code == 2,
        attributes=_attributes(span.attributes),
        duration_ms=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e6,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
