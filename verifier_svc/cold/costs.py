"""Which way to a context is the cheapest: estimates from what this verifier and the copy's writer measured.

    pool         nothing
    keys/values  bytes / bandwidth
    embeddings   bytes / bandwidth + the text model's prefill
    media        bytes / bandwidth + decoding + vision tower + the text model's prefill

The writer's times are in the manifest. They are scaled by how this verifier's own prefills compared with what was
predicted for them, so that a copy made on a faster machine does not mislead a slower one.
"""

from __future__ import annotations

from collections.abc import Mapping

from foveate.context_source import ContextCost, ContextSource
from foveate.video import ContextTimings

_FIRST_BANDWIDTH = 300e6  # bytes/s, until something was measured
_ROUND_TRIPS_MS = 2.0
_WEIGHT = 0.3  # of a new measurement
_MIN_MEASURED_BYTES = 256 * 1024


class CostModel:
    """Learns from transfers and prefills; used on the event loop only."""

    def __init__(self) -> None:
        self._read_bandwidth: float | None = None
        self._write_bandwidth: float | None = None
        self._prefill_scale = 1.0

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second."""
        return self._read_bandwidth or self._write_bandwidth or _FIRST_BANDWIDTH

    def saw_read(self, num_bytes: int, took_s: float) -> None:
        """Learns from a transfer out of the cold tier."""
        if num_bytes >= _MIN_MEASURED_BYTES:
            self._read_bandwidth = _blend(self._read_bandwidth, num_bytes / max(took_s, 1e-6))

    def saw_write(self, num_bytes: int, took_s: float) -> None:
        """Learns from a transfer into it: a first guess of what reading takes."""
        if num_bytes >= _MIN_MEASURED_BYTES:
            self._write_bandwidth = _blend(self._write_bandwidth, num_bytes / max(took_s, 1e-6))

    def saw_prefill(self, took_ms: float, recorded_ms: float) -> None:
        """Learns from a prefill whose time at the writer of its copy is known."""
        if recorded_ms > 0 and took_ms > 0:
            self._prefill_scale = _blend(self._prefill_scale, min(max(took_ms / recorded_ms, 0.02), 50.0))

    def rank(self, num_bytes: Mapping[ContextSource, int], timings: ContextTimings | None) -> tuple[ContextCost, ...]:
        """Returns the cost of every way in `num_bytes` (bytes to be read), cheapest first.

        Without `timings` nothing is known of computing: then only reading is ranked before media.
        """
        costs = [
            ContextCost(source, self._estimated_ms(source, size, timings), size) for source, size in num_bytes.items()
        ]
        return tuple(sorted(costs, key=lambda cost: (cost.estimated_ms, cost.source)))

    def _estimated_ms(self, source: ContextSource, num_bytes: int, timings: ContextTimings | None) -> float:
        if source is ContextSource.POOL:
            return 0.0
        reading_ms = num_bytes / self.read_bandwidth * 1e3 + _ROUND_TRIPS_MS if num_bytes else 0.0
        if timings is None or source in (ContextSource.COLD_KV, ContextSource.COLD_KV_INT8):
            return reading_ms
        computing_ms = timings.prefill_ms
        if source is ContextSource.MEDIA:
            computing_ms += timings.decode_ms + timings.encode_ms
        return reading_ms + computing_ms * self._prefill_scale


def _blend(before: float | None, now: float) -> float:
    return now if before is None else (1 - _WEIGHT) * before + _WEIGHT * now
