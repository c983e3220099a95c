"""Qwen2.5-VL: temporal positions follow absolute time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from engine.families.base import Family
from engine.positions import time_ids


@dataclass(frozen=True)
class Qwen25VlFamily(Family):
    """Qwen2.5-VL and its fine-tunes."""

    model_type: ClassVar[str] = "qwen2_5_vl"

    tokens_per_second: float

    @classmethod
    def _facts(cls, config: Any) -> dict[str, Any]:
        return {**super()._facts(config), "tokens_per_second": config.vision_config.tokens_per_second}

    def video_time_ids(self, num_steps: int, second_per_grid: float) -> tuple[int, ...]:
        return time_ids(num_steps, second_per_grid, self.tokens_per_second)
