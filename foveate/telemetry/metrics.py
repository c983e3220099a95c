"""Instruments by name. Without an SDK they do nothing. Gauges are read when asked for, never on the way of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation

from foveate.telemetry import conventions

Labels = Mapping[str, str | int]
Reading = Callable[[], Iterable[tuple[float, Labels]]]


def _meter() -> metrics.Meter:
    return metrics.get_meter(conventions.SCOPE)


def counter(name: str, description: str, *, unit: str = "") -> Counter:
    """Returns a counter. A unit of "1" would end as `_ratio` in Prometheus."""
    return _meter().create_counter(name, unit, description)


def histogram(name: str, description: str, *, unit: str, bounds: Iterable[float]) -> Histogram:
    """Returns a histogram with buckets of these upper bounds."""
    return _meter().create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=list(bounds))


def counted(name: str, description: str, read: Reading) -> None:
    """Makes a counter of what `read` returns: counts since the start, with labels. Otherwise as `gauge`."""
    _meter().create_observable_counter(name, [_observing(read)], "", description)


def gauge(name: str, description: str, read: Reading, *, unit: str = "") -> None:
    """Makes a gauge of what `read` returns, values with labels. It is called in a thread of the exporter's."""

    _meter().create_observable_gauge(name, [_observing(read)], unit, description)


def _observing(read: Reading) -> Callable[[CallbackOptions], list[Observation]]:
    return lambda _: [Observation(value, dict(labels)) for value, labels in read()]
