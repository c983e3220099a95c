"""Frames to patches by the model's own processor, a chunk at a time, equal to the whole video at once.

A chunk is a multiple of the temporal patch, so that grids do not straddle chunks; the last one is padded by the
processor, as it pads a whole video. The one setting that looks at the whole video, the cap on a frame's pixels by the
number of frames, is computed once and given to every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize

from foveate.rpc.errors import invalid
from verifier_svc.video import RgbFrame


@dataclass(frozen=True)
class Grid:
    """A video's patches before merging: temporal patches, rows, columns."""

    num_temporal: int
    num_rows: int
    num_columns: int

    @property
    def num_patches(self) -> int:
        """Number of patches, merge_size squared of which make one visual token."""
        return self.num_temporal * self.num_rows * self.num_columns

    def as_tensor(self) -> Tensor:
        """Returns int64 [1, 3], the processor's video_grid_thw."""
        return torch.tensor([[self.num_temporal, self.num_rows, self.num_columns]])


class FrameProcessor:
    """The video processor of one checkpoint; frames are already sampled, so it never samples nor guesses a rate."""

    def __init__(self, video_processor: Any) -> None:
        self._processor = video_processor
        self.temporal_patch: int = video_processor.temporal_patch_size
        self.merge_size: int = video_processor.merge_size
        self._patch_size: int = video_processor.patch_size

    def settings(self) -> dict[str, Any]:
        """Returns every setting that changes pixels or grids, for the identity of a context."""
        settings: dict[str, Any] = self._processor.to_dict()
        return settings

    def plan(self, *, num_frames: int, height: int, width: int) -> Grid:
        """Returns the grid of a video; INVALID_ARGUMENT when its shape is one the model cannot look at."""
        try:
            rows, columns = smart_resize(
                height,
                width,
                factor=self._patch_size * self.merge_size,
                min_pixels=self._min_pixels,
                max_pixels=self._max_pixels(num_frames),
            )
        except (ValueError, ZeroDivisionError) as error:
            raise invalid("spec", f"the model cannot look at frames of {width} x {height} pixels") from error
        num_temporal = -(-num_frames // self.temporal_patch)
        return Grid(num_temporal, rows // self._patch_size, columns // self._patch_size)

    def num_tokens(self, grid: Grid) -> int:
        """Returns the number of visual tokens of a grid."""
        return grid.num_patches // self.merge_size**2

    def process(self, frames: RgbFrame, *, num_frames_of_video: int) -> tuple[Tensor, Grid]:
        """Returns patches [num_patches, patch_width] and the grid of a chunk of frames [n, height, width, 3]."""
        video = torch.from_numpy(frames).permute(0, 3, 1, 2)  # [num_frames, 3, height, width]
        size = {"shortest_edge": self._min_pixels, "longest_edge": self._max_pixels(num_frames_of_video)}
        output = self._processor(
            videos=[video],
            do_sample_frames=False,
            return_metadata=False,
            size=size,
            cap_pixels_per_frame=False,
            return_tensors="pt",
        )
        num_temporal, num_rows, num_columns = output["video_grid_thw"][0].tolist()
        return output["pixel_values_videos"], Grid(num_temporal, num_rows, num_columns)

    @property
    def _min_pixels(self) -> int:
        return int(self._processor.size["shortest_edge"])

    def _max_pixels(self, num_frames: int) -> int:
        """Returns the pixels a frame may have, by the processor's own rule (Qwen2VLVideoProcessor.resize)."""
        most = int(self._processor.size["longest_edge"])
        if not getattr(self._processor, "cap_pixels_per_frame", False):
            return most
        factor = self._patch_size * self.merge_size
        total = int(self._processor.max_video_tokens * factor * factor * 0.9)
        return max(min(most, total * self.temporal_patch // num_frames), int(self._min_pixels * 1.05))
