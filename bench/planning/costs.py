"""What a round costs: lines fitted to measurements, or a roofline of a model on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Milliseconds at n: `at_zero` + n * `each`."""

    at_zero: float
    each: float

    def at(self, n: float) -> float:
        """Returns the milliseconds at n."""
        return self.at_zero + n * self.each

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Returns the least squares line; a level one through a single abscissa, never a falling one."""
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        covered = sum((x - mean_x) * (y - mean_y) for x, y in points)
        each = max(0.0, covered / spread) if spread else 0.0
        return cls(mean_y - each * mean_x, each)


@dataclass(frozen=True)
class Costs:
    """Milliseconds of device time by number of draft tokens, and of everything that is none, by kind of round."""

    draft: Line
    verify: Line
    drafted_overhead: float = 0.0
    plain_overhead: float = 0.0


@dataclass(frozen=True)
class Model:
    """A text model in 16 bits. Bytes of KV are of one token, over all layers."""

    name: str
    num_parameters: float
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        """Bytes that every step reads, however many rows it has."""
        return 2.0 * self.num_parameters

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values of a token."""
        return 2.0 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Device:
    """Peaks of a data sheet; bytes and 16-bit operations per second, without sparsity."""

    name: str
    bytes_per_s: float
    flops: float


# Sizes of the published configurations (text model, output head included).
MODELS = (
    Model("3B", 3.09e9, 36, 2, 128),
    Model("7B", 7.62e9, 28, 4, 128),
    Model("32B", 32.8e9, 64, 8, 128),
    Model("72B", 72.7e9, 80, 8, 128),
)
DEVICES = (Device("H100 SXM", 3.35e12, 989e12), Device("H200", 4.8e12, 989e12))
REACHED = 0.7  # share of the peaks that a good kernel reaches
STEP_MS = 0.15  # launching a captured step


def step_ms(model: Model, device: Device, *, num_rows: int, num_tokens: float, num_devices: float = 1.0) -> float:
    """Returns the time of a step over `num_tokens` of context: as long as its slower half, reading or arithmetic."""
    read_s = (model.weight_bytes + num_tokens * model.kv_bytes) / (REACHED * device.bytes_per_s)
    compute_s = 2 * model.num_parameters * num_rows / (REACHED * device.flops)
    return max(read_s, compute_s) * 1e3 / num_devices + STEP_MS


def roofline(
    target: Model, drafter: Model, device: Device, *, num_tokens: float, budget: float, overhead_ms: float
) -> Costs:
    """Returns the costs of rounds whose drafter reads a share `budget` of the context."""
    one, many = (step_ms(target, device, num_rows=rows, num_tokens=num_tokens) for rows in (1, 17))
    draft = step_ms(drafter, device, num_rows=1, num_tokens=budget * num_tokens)
    return Costs(Line(0.0, draft), Line(one, (many - one) / 16), overhead_ms, overhead_ms / 2)
