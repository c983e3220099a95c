"""Where traces and metrics go: decided at start from the standard OTEL_* variables, closed at the end.

    OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT, ..._METRICS_ENDPOINT)   sends both (or that one) by OTLP/gRPC
    OTEL_TRACES_EXPORTER=none, OTEL_METRICS_EXPORTER=none                        leaves one out
    OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG, OTEL_RESOURCE_ATTRIBUTES,
    OTEL_EXPORTER_OTLP_HEADERS, ..._CERTIFICATE, OTEL_BSP_*, ...                 read by the SDK itself
    OTEL_SDK_DISABLED=true                                                       turns all of it off

Unlike the SDK's own default, nothing is sent to localhost when nothing is set.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import foveate

_CLOSE_S = 3.0  # a collector that is away must not hold a service that ends
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")


@dataclass(frozen=True)
class TelemetryConfig:
    """What to record of a service. `metrics_address` is "host:port" of the Prometheus endpoint; empty: none."""

    service: str
    sends_traces: bool = False
    sends_metrics: bool = False
    metrics_address: str = ""

    @classmethod
    def of(cls, service: str, metrics_address: str, environment: Mapping[str, str]) -> TelemetryConfig:
        """Returns what the environment asks for."""
        is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        return cls(
            environment.get("OTEL_SERVICE_NAME") or f"foveate-{service}",
            sends_traces=not is_off and _is_sent("TRACES", environment),
            sends_metrics=not is_off and _is_sent("METRICS", environment),
            metrics_address="" if is_off else metrics_address,
        )

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self.sends_traces or self.sends_metrics or bool(self.metrics_address)


NO_TELEMETRY = TelemetryConfig("foveate")


def _is_sent(signal: str, environment: Mapping[str, str]) -> bool:
    exporter = environment.get(f"OTEL_{signal}_EXPORTER", "").lower()
    if exporter:
        return exporter == "otlp"
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return any(environment.get(name) for name in names)


@dataclass
class Telemetry:
    """What was started; `metrics_port` is the Prometheus endpoint's port, None without one."""

    metrics_port: int | None = None
    _closers: list[Callable[[], Any]] = field(default_factory=list)

    @classmethod
    def start(cls, config: TelemetryConfig) -> Telemetry:
        """Starts what `config` asks for, before anything that is recorded is made.

        Raises ValueError when the extra is not installed or the address is malformed, OSError when it is taken.
        """
        telemetry = cls()
        if not config.is_on:
            return telemetry
        missing = [name for name in _NEEDED if not _is_there(name)]
        if missing:
            raise ValueError(f"telemetry is on but {missing[0]} is not installed: pip install 'foveate[telemetry]'")
        from opentelemetry.sdk.resources import Resource

        resource = Resource.create(
            {
                "service.name": config.service,
                "service.version": foveate.__version__,
                "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
            }
        )
        try:
            if config.sends_traces:
                telemetry._closers.append(_start_traces(resource))
            telemetry._start_metrics(resource, config)
        except BaseException:
            telemetry.close()
            raise
        return telemetry

    def close(self) -> None:
        """Sends what is left, for three seconds at most. Idempotent."""
        closers, self._closers = self._closers, []
        threads = [threading.Thread(target=_quietly, args=(close,), daemon=True) for close in closers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_CLOSE_S)

    def _start_metrics(self, resource: Any, config: TelemetryConfig) -> None:
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

        readers: list[MetricReader] = []
        if config.sends_metrics:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

            readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
        if config.metrics_address:
            readers.append(self._start_prometheus(config.metrics_address))
        if readers:
            provider = MeterProvider(readers, resource)
            metrics.set_meter_provider(provider)
            self._closers.append(provider.shutdown)

    def _start_prometheus(self, address: str) -> Any:
        import prometheus_client
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        host, _, port = address.rpartition(":")
        if not port.isdecimal():
            raise ValueError(f"--metrics-address must be HOST:PORT, not {address!r}")
        try:
            server, _ = prometheus_client.start_http_server(int(port), host.strip("[]") or "0.0.0.0")
        except (OSError, OverflowError) as error:
            raise OSError(f"cannot serve metrics on {address}: {error}") from error
        self.metrics_port = server.server_port
        self._closers += [server.shutdown, server.server_close]
        return PrometheusMetricReader()


def _start_traces(resource: Any) -> Callable[[], Any]:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from foveate.telemetry.exporting import SpanExporter

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(SpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _quietly(close: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        close()
