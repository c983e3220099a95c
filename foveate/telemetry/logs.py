"""Structured logs: one JSON object a line on stderr, with the ids of the trace that was current."""

from __future__ import annotations

import logging
import sys

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, WrappedLogger


def log_to_stderr(service: str, *, level: int = logging.INFO) -> None:
    """Sends all logs, those of libraries too, to stderr: time, level, logger, message, service, and the event's own."""

    def name_service(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        name_service,
        add_trace_ids,
        structlog.processors.format_exc_info,
        structlog.processors.EventRenamer("message"),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared[:-1],
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared[:-1],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            shared[-1],
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler])


def add_trace_ids(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Adds `trace_id` and `span_id` in hex, as a trace's viewer shows them, when a span is current."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event
