"""Telemetry starts as it is told, in a process of its own (providers are for ever), and never holds up the end."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from foveate.telemetry.setup import Telemetry, TelemetryConfig

PROGRAM = """
import sys, urllib.request
from foveate.telemetry import metrics
from foveate.telemetry.setup import Telemetry, TelemetryConfig
telemetry = Telemetry.start(TelemetryConfig.of("verifier", "127.0.0.1:0", {}))
metrics.gauge("foveate.things", "Things", lambda: [(7, {"foveate.kind": "blue"})])
metrics.counter("foveate.events", "Events").add(3, {"foveate.reason": "why"})
metrics.histogram("foveate.took", "Took", unit="s", bounds=(0.001, 0.5)).record(0.2, {})
sys.stdout.write(urllib.request.urlopen(f"http://127.0.0.1:{telemetry.metrics_port}/metrics").read().decode())
telemetry.close()
"""
AWAY = """
import time
from opentelemetry import trace
from foveate.telemetry.setup import Telemetry, TelemetryConfig
config = TelemetryConfig("foveate-verifier", sends_traces=True, sends_metrics=True)
telemetry = Telemetry.start(config)
trace.get_tracer("t").start_span("x").end()
before = time.monotonic()
telemetry.close()
print(time.monotonic() - before)
"""


def run(program: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_prometheus_sees_the_names_that_dashboards_use() -> None:
    text = run(PROGRAM)
    assert 'foveate_things{foveate_kind="blue"' in text
    assert 'foveate_events_total{foveate_reason="why"' in text
    assert 'foveate_took_seconds_bucket{le="0.5"' in text
    assert 'service_name="foveate-verifier"' in text


def test_a_collector_that_is_away_does_not_hold_up_the_end() -> None:
    before = time.monotonic()
    took_s = float(run(AWAY, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1").split()[-1])
    assert took_s < 5
    assert time.monotonic() - before < 100


def test_nothing_is_started_that_was_not_asked_for() -> None:
    telemetry = Telemetry.start(TelemetryConfig("foveate-gateway"))
    assert telemetry.metrics_port is None
    telemetry.close()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:", "127.0.0.1:port"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="--metrics-address"):
        Telemetry.start(TelemetryConfig("foveate-gateway", metrics_address=address))


def test_a_missing_extra_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foveate.telemetry.setup._is_there", lambda module: False)
    with pytest.raises(ValueError, match=r"pip install 'foveate\[telemetry\]'"):
        Telemetry.start(TelemetryConfig("foveate-gateway", sends_traces=True))
