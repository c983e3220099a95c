"""Qwen3-VL: frames between timestamps in words, interleaved rotations, and visual features for the first layers too.

Every step of a video is a run of placeholders of its own, `<1.5 seconds>` before it, so that positions need not count
time. The steps stand in place of the markers that the chat template writes around a video, as in the model's release;
transformers 5.24 keeps those markers around them. The tower gives features of some of its own layers beside the last
(DeepStack, arXiv 2406.04334): they are added to the hidden states behind the text model's first layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.families.base import Family, GridShape, VideoText
from engine.families.qwen_frames import QwenFrames
from engine.frames import Grid, RgbFrames, as_video
from engine.positions import VisionGrid


@dataclass(frozen=True)
class Qwen3VlFamily(Family):
    """Qwen3-VL with a dense text model."""

    model_type: ClassVar[str] = "qwen3_vl"

    start_markup: ClassVar[str] = "<|vision_start|>"
    video_markup: ClassVar[str] = "<|video_pad|>"
    end_markup: ClassVar[str] = "<|vision_end|>"

    def video_time_ids(self, num_steps: int, second_per_grid: float) -> tuple[int, ...]:
        return (0,) * num_steps

    def _video_blocks(self, grid: GridShape, second_per_grid: float) -> list[VisionGrid]:
        return [self._block((0,), grid)] * grid[0]

    def video_text(self, grid: GridShape, timestamps_s: Sequence[float]) -> VideoText:
        steps, patch = grid[0], self.temporal_patch_size
        times = list(timestamps_s)
        times += times[-1:] * (steps * patch - len(times))
        middles = [(times[at] + times[at + patch - 1]) / 2 for at in range(0, len(times), patch)]
        block = self.start_markup + self.video_markup + self.end_markup
        markup = "".join(f"<{middle:.1f} seconds>{block}" for middle in middles)
        return VideoText((self.num_visual_tokens((1, *grid[1:])),) * steps, block, markup)

    def frames(self, video_processor: Any) -> QwenFrames:
        return _Qwen3Frames(video_processor)

    def encode_video(self, model: Any, patches: Tensor, video_grid_thw: Tensor) -> Tensor:
        with torch.inference_mode():
            output = model.model.visual(patches, grid_thw=video_grid_thw, return_dict=True)
            return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)

    def axis_of_frequency(self, text_config: Any) -> Tensor:
        sections = text_config.rope_parameters["mrope_section"]
        axes = torch.zeros(text_config.head_dim // 2, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes


class _Qwen3Frames(QwenFrames):
    """Qwen3VLVideoProcessor, whose limits on pixels are a whole video's."""

    def _resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize  # as QwenFrames does

        num_frames = max(num_frames, self.temporal_patch)  # a video of less is filled up with its last frame
        rows, columns = smart_resize(
            num_frames,
            height,
            width,
            temporal_factor=self.temporal_patch,
            factor=self._factor,
            min_pixels=self._min_pixels,
            max_pixels=self._max_pixels(num_frames),
        )
        return int(rows), int(columns)

    def _max_pixels(self, num_frames: int) -> int:
        """Returns the pixels all frames may have together, by the processor's own rule (its `resize`)."""
        most = int(self._processor.size["longest_edge"])
        if not getattr(self._processor, "cap_pixels_per_frame", False):
            return most
        of_frame = min(int(self._processor.max_video_tokens) * self._factor**2, most // num_frames)
        return max(of_frame, int(self._min_pixels * 1.05)) * num_frames

    def process(self, frames: RgbFrames, *, num_frames_of_video: int) -> tuple[Tensor, Grid]:
        from transformers.image_utils import SizeDict
        from transformers.video_processing_utils import BaseVideoProcessor

        # The processor would give a chunk the size of a whole video of its length.
        height, width = self._resized(num_frames_of_video, *frames.shape[1:3])
        video, size = as_video(frames), SizeDict(height=height, width=width)
        resized = BaseVideoProcessor.resize(self._processor, video, size=size, resample=self._processor.resample)
        return self._processed(resized.permute(0, 2, 3, 1).numpy(), do_resize=False)
