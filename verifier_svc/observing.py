"""What a verifier tells of itself: gauges that are read when somebody asks, and the tiers that gave contexts."""

from __future__ import annotations

from collections.abc import Iterable

from foveate.telemetry import conventions as names
from foveate.telemetry import metrics
from foveate.telemetry.metrics import Labels
from verifier_svc.verifier import Verifier


def observe(verifier: Verifier) -> None:
    """Makes the gauges of a loaded verifier. They read plain numbers, from a thread of the exporter's."""
    pool = verifier.parts.pool
    gauge = metrics.gauge
    gauge(names.METRIC_POOL_BYTES, "KV memory", lambda: [(pool.pool_bytes, {})], unit="By")
    gauge(names.METRIC_POOL_USED, "KV memory taken, by whom", lambda: _used(verifier), unit="By")
    gauge(names.METRIC_CONTEXTS, "Contexts in the pool", lambda: [(verifier.contexts.num_slabs, {})])
    gauge(names.METRIC_SEQUENCES, "Answers that are open", lambda: [(verifier.num_sequences, {})])
    gauge(names.METRIC_DEVICE_QUEUE, "Steps that wait or run", lambda: [(_num_waiting(verifier), {})])
    metrics.counted(names.METRIC_DEVICE_STEPS, "Steps of rounds", lambda: [(verifier.scheduler.num_steps, {})])
    metrics.counted(names.METRIC_DEVICE_BLOCKS, "Rounds in them", lambda: [(verifier.scheduler.num_blocks, {})])
    metrics.counted(
        names.METRIC_CONTEXT_EVENTS,
        "What happened to contexts (docs/contexts.md): hits, restores, evictions, damaged copies, ...",
        lambda: [(count, {names.EVENT: event}) for event, count in verifier.context_counters().items()],
    )
    redis = verifier.redis
    if redis is not None:
        gauge(
            names.METRIC_COLD_BYTES,
            "Cold copies in Redis, at this verifier's last write",
            lambda: [(redis.cold.num_bytes_kept, {})],
            unit="By",
        )
        gauge(names.METRIC_BREAKER, "1 while Redis is left alone", lambda: [(int(redis.store.breaker.is_open), {})])


def _num_waiting(verifier: Verifier) -> int:
    return verifier.device.num_waiting + verifier.scheduler.num_live


def _used(verifier: Verifier) -> Iterable[tuple[float, Labels]]:
    contexts = min(verifier.contexts.num_bytes, verifier.parts.pool.used_bytes)
    yield contexts, {names.OWNER: "context"}
    yield verifier.parts.pool.used_bytes - contexts, {names.OWNER: "thread"}
