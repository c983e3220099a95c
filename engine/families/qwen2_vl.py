"""Qwen2-VL: temporal positions count steps, whatever time lies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.families.base import Family
from engine.positions import time_ids


@dataclass(frozen=True)
class Qwen2VlFamily(Family):
    """Qwen2-VL and its fine-tunes."""

    model_type: ClassVar[str] = "qwen2_vl"

    def video_time_ids(self, num_steps: int, second_per_grid: float) -> tuple[int, ...]:
        return time_ids(num_steps, None, 1.0)
