"""Frames for Qwen2-VL and Qwen2.5-VL: patches over pairs of frames, in groups that the tower merges."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.frames import FrameProcessor, Grid, RgbFrames, as_video, cannot_look_at


class QwenFrames(FrameProcessor):
    """Qwen2VLVideoProcessor, whose limits on pixels are a frame's."""

    def __init__(self, video_processor: Any) -> None:
        super().__init__(video_processor)
        self.temporal_patch = int(video_processor.temporal_patch_size)
        self._patch_size = int(video_processor.patch_size)
        self._factor = self._patch_size * int(video_processor.merge_size)

    def plan(self, *, num_frames: int, height: int, width: int) -> Grid:
        try:
            rows, columns = self._resized(num_frames, height, width)
        except (ValueError, ZeroDivisionError) as error:
            raise cannot_look_at(height, width) from error
        num_temporal = -(-num_frames // self.temporal_patch)
        return Grid(num_temporal, rows // self._patch_size, columns // self._patch_size)

    def _resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Returns height and width after resizing; raises ValueError or ZeroDivisionError."""
        # Imports torchvision, which a process without a vision tower need not spend seconds on.
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize

        rows, columns = smart_resize(
            height,
            width,
            factor=self._factor,
            min_pixels=self._min_pixels,
            max_pixels=self._max_pixels(num_frames),
        )
        return int(rows), int(columns)

    def process(self, frames: RgbFrames, *, num_frames_of_video: int) -> tuple[Tensor, Grid]:
        size = {"shortest_edge": self._min_pixels, "longest_edge": self._max_pixels(num_frames_of_video)}
        return self._processed(frames, size=size, cap_pixels_per_frame=False)

    def _processed(self, frames: RgbFrames, **settings: Any) -> tuple[Tensor, Grid]:
        output = self._processor(
            videos=[as_video(frames)],
            do_sample_frames=False,
            return_metadata=False,
            return_tensors="pt",
            **settings,
        )
        return output["pixel_values_videos"], Grid(*output["video_grid_thw"][0].tolist())

    @property
    def _min_pixels(self) -> int:
        return int(self._processor.size["shortest_edge"])

    def _max_pixels(self, num_frames: int) -> int:
        """Returns the pixels a frame may have, by the processor's own rule (Qwen2VLVideoProcessor.resize)."""
        most = int(self._processor.size["longest_edge"])
        if not getattr(self._processor, "cap_pixels_per_frame", False):
            return most
        total = int(self._processor.max_video_tokens * self._factor * self._factor * 0.9)
        return max(min(most, total * self.temporal_patch // num_frames), int(self._min_pixels * 1.05))
