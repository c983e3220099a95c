"""A real OTLP receiver in a process of its own, as a collector is: gRPC's TraceService and MetricsService.

It writes what arrives to a file, as it came; who started it reads along: `python -m bench.otlp FILE`.
"""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

_HEAD = struct.Struct("<BI")  # of a request in the file: what it has, number of bytes
_TRACES, _METRICS = 0, 1
_SERVICES = {
    "opentelemetry.proto.collector.trace.v1.TraceService": _TRACES,
    "opentelemetry.proto.collector.metrics.v1.MetricsService": _METRICS,
}


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


class Receiver:
    """The receiver's process, seen from outside: what it has received so far, read from the file that it writes."""

    def __init__(self, endpoint: str, received: Path) -> None:
        self.endpoint = endpoint
        self._received = received
        self._num_read = 0
        self._spans: list[ReceivedSpan] = []
        self._metric_names: set[str] = set()
        self._lock = threading.Lock()

    def spans(self) -> list[ReceivedSpan]:
        """Returns the spans in the order in which they arrived."""
        self._read()
        return list(self._spans)

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """Returns the spans by trace."""
        found: dict[str, list[ReceivedSpan]] = {}
        for span in self.spans():
            found.setdefault(span.trace_id, []).append(span)
        return found

    def metric_names(self) -> set[str]:
        """Returns the names of all metrics that arrived."""
        self._read()
        return set(self._metric_names)

    def environment(self, **more: str) -> dict[str, str]:
        """Returns the standard variables that send everything here, soon."""
        told = {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        return {**told, "OTEL_METRIC_EXPORT_INTERVAL": "500", **more}

    def _read(self) -> None:
        with self._lock, self._received.open("rb") as file:
            file.seek(self._num_read)
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                kind, num_bytes = _HEAD.unpack(head)
                data = file.read(num_bytes)
                if len(data) < num_bytes:  # the rest of it is on its way
                    break
                self._num_read = file.tell()
                if kind == _TRACES:
                    self._spans.extend(_spans(trace_service_pb2.ExportTraceServiceRequest.FromString(data)))
                else:
                    self._metric_names.update(_names(metrics_service_pb2.ExportMetricsServiceRequest.FromString(data)))


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Runs a receiver in a process of its own, on a free port of the loopback."""
    with tempfile.TemporaryDirectory(prefix="foveate-otlp-") as folder:
        received = Path(folder) / "received"
        received.touch()
        command = [sys.executable, "-m", "bench.otlp", str(received)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise RuntimeError("the receiver did not start")
            yield Receiver(f"http://127.0.0.1:{port}", received)
        finally:
            process.communicate()  # closes its stdin, which ends it


def main(received: Path) -> None:
    """Serves until stdin is closed; writes every request to `received` as it came: a bench's load is not of here."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    lock = threading.Lock()
    with received.open("ab", buffering=0) as file:

        def handler(kind: int) -> Any:
            def keep(data: bytes, context: Any) -> bytes:
                with lock:
                    file.write(_HEAD.pack(kind, len(data)) + data)
                return b""  # an empty reply says that everything was taken

            return grpc.unary_unary_rpc_method_handler(keep)

        for service, kind in _SERVICES.items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler(kind)}),))
        print(server.add_insecure_port("127.0.0.1:0"), flush=True)
        server.start()
        sys.stdin.read()
        server.stop(0).wait()


def _names(request: Any) -> Iterator[str]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            yield from (metric.name for metric in scope.metrics)


def _spans(request: Any) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(service, span)


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
    return {pair.key: _plain(pair.value) for pair in pairs}


def _plain(value: Any) -> Any:
    """Returns an attribute as JSON has it."""
    kind = value.WhichOneof("value")
    return [_plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
