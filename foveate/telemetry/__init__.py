"""Traces, metrics and logs of every service.

    conventions   every name that leaves the process: spans, attributes, metrics
    spans         spans of a call, written down while it runs and made when it is over
    rpc           one span per call on both sides, and the caller's context handed on
    logs          structured logs that carry the trace's id
    setup         exporters, built from the standard OTEL_* variables; without them nothing is recorded

Only `setup` needs the SDK (extra `telemetry`). Everything else is written against opentelemetry-api, which does
nothing until an SDK is there: so the client can be a part of its caller's traces at no weight, and a service without an
exporter pays for a few checks per call.
"""
