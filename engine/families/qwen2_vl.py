"""Qwen2-VL: temporal positions count steps, whatever time lies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from engine.families.base import Family, axes_by_section
from engine.families.qwen_frames import QwenFrames
from engine.positions import time_ids


@dataclass(frozen=True)
class Qwen2VlFamily(Family):
    """Qwen2-VL and its fine-tunes."""

    model_type: ClassVar[str] = "qwen2_vl"

    def video_time_ids(self, num_steps: int, second_per_grid: float) -> tuple[int, ...]:
        return time_ids(num_steps, None, 1.0)

    def frames(self, video_processor: Any) -> QwenFrames:
        return QwenFrames(video_processor)

    def axis_of_frequency(self, text_config: Any) -> Tensor:
        return axes_by_section(text_config.rope_parameters["mrope_section"])
