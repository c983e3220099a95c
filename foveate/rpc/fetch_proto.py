"""ContextFetch to messages and back."""

from __future__ import annotations

from foveate.context_source import ContextCost, ContextFetch, ContextSource
from foveate.v1 import contexts_pb2

_KNOWN = {int(source) for source in ContextSource}


def fetch_to_proto(fetch: ContextFetch) -> contexts_pb2.ContextFetch:
    """Returns the message."""
    costs = [
        contexts_pb2.ContextCost(
            source=contexts_pb2.ContextSource.ValueType(cost.source),
            estimated_ms=cost.estimated_ms,
            num_bytes=cost.num_bytes,
        )
        for cost in fetch.costs
    ]
    source = contexts_pb2.ContextSource.ValueType(fetch.source)
    return contexts_pb2.ContextFetch(source=source, took_ms=fetch.took_ms, costs=costs)


def fetch_from_proto(message: contexts_pb2.ContextFetch) -> ContextFetch | None:
    """Returns the value; None for a message that is unset or names a source that a newer server invented."""
    if message.source not in _KNOWN:
        return None
    costs = tuple(
        ContextCost(ContextSource(cost.source), cost.estimated_ms, cost.num_bytes)
        for cost in message.costs
        if cost.source in _KNOWN
    )
    return ContextFetch(ContextSource(message.source), message.took_ms, costs)
