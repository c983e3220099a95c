"""Qwen2.5-VL: temporal positions follow absolute time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine.families.base import Family, axes_by_section
from engine.families.qwen_frames import QwenFrames
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

    def frames(self, video_processor: Any) -> QwenFrames:
        return QwenFrames(video_processor)

    def axis_of_frequency(self, text_config: Any) -> Tensor:
        return axes_by_section(text_config.rope_parameters["mrope_section"])
