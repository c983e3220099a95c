"""What a drafter tells of itself: gauges that are read when somebody asks."""

from __future__ import annotations

from drafter_svc.drafter import Drafter
from foveate.telemetry import conventions as names
from foveate.telemetry import metrics


def observe(drafter: Drafter) -> None:
    """Makes the gauges of a loaded drafter. They read plain numbers, from a thread of the exporter's."""
    gauge = metrics.gauge
    gauge(names.METRIC_SEQUENCES, "Answers that are open", lambda: [(drafter.num_sequences, {})])
    gauge(names.METRIC_DEVICE_QUEUE, "Steps that wait or run", lambda: [(drafter.num_waiting, {})])
    metrics.counted(names.METRIC_DEVICE_STEPS, "Steps of drafts", lambda: [(drafter.num_steps, {})])
    metrics.counted(names.METRIC_DEVICE_BLOCKS, "Drafts that took part in them", lambda: [(drafter.num_blocks, {})])
    gauge(names.METRIC_ATTACHED_POOLS, "Verifiers' pools that are mapped", lambda: [(drafter.num_pools, {})])
