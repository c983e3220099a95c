"""Logs are JSON lines, whoever wrote them, and carry the trace they were written in."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from foveate.telemetry.logs import log_to_stderr


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    root = logging.getLogger()
    before, root.handlers = (root.handlers, root.level), []
    try:
        log_to_stderr("gateway")
        yield
    finally:
        root.handlers, level = before
        root.setLevel(level)
        structlog.reset_defaults()


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    found: dict[str, str] = json.loads(lines[0])
    return found


def test_an_error_of_a_library_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr():
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("some.where").exception("it %s", "failed")
    line = told(capsys)
    assert (line["level"], line["logger"], line["message"]) == ("error", "some.where", "it failed")
    assert (line["service"], line["time"][-1]) == ("gateway", "Z")
    assert "ValueError: why" in line["exception"]
    assert "trace_id" not in line


def test_an_event_has_its_values_and_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(0)))
    with logging_to_stderr(), trace.use_span(span):
        structlog.get_logger("gateway.answers").info("answered", num_tokens=7)
    line = told(capsys)
    assert (line["message"], line["num_tokens"]) == ("answered", 7)
    assert (line["trace_id"], line["span_id"]) == (f"{0xABC:032x}", f"{0xDEF:016x}")
