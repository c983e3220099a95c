"""Frames to patches by the model's own processor, a chunk at a time, equal to the whole video at once.

A chunk is a multiple of the temporal patch, so that grids do not straddle chunks; the last one is padded as a whole
video is. Settings that look at the whole video, such as a cap on a frame's pixels by the number of frames, are computed
once and given to every chunk.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foveate.rpc.errors import InvalidArgument, invalid

RgbFrames = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Grid:
    """A video's patches before merging: temporal patches, rows, columns."""

    num_temporal: int
    num_rows: int
    num_columns: int

    @property
    def num_patches(self) -> int:
        """Number of patches."""
        return self.num_temporal * self.num_rows * self.num_columns

    @property
    def shape(self) -> tuple[int, int, int]:
        """(time, rows, columns)."""
        return self.num_temporal, self.num_rows, self.num_columns

    def as_tensor(self) -> Tensor:
        """Returns int64 [1, 3], the processor's video_grid_thw."""
        return torch.tensor([self.shape])


class FrameProcessor(abc.ABC):
    """The video processor of one checkpoint; frames are already sampled, so it never samples nor guesses a rate."""

    temporal_patch: int

    def __init__(self, video_processor: Any) -> None:
        self._processor = video_processor

    def settings(self) -> dict[str, Any]:
        """Returns every setting that changes pixels or grids, for the identity of a context."""
        settings: dict[str, Any] = self._processor.to_dict()
        return settings

    @abc.abstractmethod
    def plan(self, *, num_frames: int, height: int, width: int) -> Grid:
        """Returns the grid of a video; INVALID_ARGUMENT when its shape is one the model cannot look at."""

    @abc.abstractmethod
    def process(self, frames: RgbFrames, *, num_frames_of_video: int) -> tuple[Tensor, Grid]:
        """Returns patches [num_patches, patch_width] and the grid of a chunk of frames [n, height, width, 3]."""


def as_video(frames: RgbFrames) -> Tensor:
    """Returns frames [n, height, width, 3] as processors take a video: uint8 [n, 3, height, width]."""
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


def cannot_look_at(height: int, width: int) -> InvalidArgument:
    """Returns the error of frames whose shape no model could use."""
    return invalid("spec", f"the model cannot look at frames of {width} x {height} pixels")
