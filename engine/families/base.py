"""What a model family has to say about itself.

    geometry    how many visual tokens a grid has, where they stand in a prompt, and their positions
    frames      the video processor, chunk by chunk
    modules     vision tower, text model and head, and which axis of a position turns which frequency

A family is one file of this package: it is found by its `model_type`, and nothing else names it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from engine.frames import FrameProcessor
from engine.positions import Positions, VisionGrid, prompt_positions

GridShape = tuple[int, int, int]  # time, height, width in patches before merging


@dataclass(frozen=True)
class VideoText:
    """How a video stands in a prompt: as runs of placeholders, of `spans` tokens each.

    Where the chat template writes `replaced`, the prompt has `markup`, with one placeholder for each run; both are
    empty when the template's own placeholder stays.
    """

    spans: tuple[int, ...]
    replaced: str = ""
    markup: str = ""


@dataclass(frozen=True)
class Family(abc.ABC):
    """Special ids and geometry from a checkpoint's config, and how the family places and encodes vision blocks."""

    model_type: ClassVar[str]
    # Whether `engine.decoder` reproduces the text model's layers to the bit.
    has_plain_layers: ClassVar[bool] = True

    video_token_id: int
    image_token_id: int
    marker_token_ids: tuple[int, ...]
    spatial_merge_size: int
    temporal_patch_size: int

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Reads the family's facts from a transformers config."""
        return cls(**cls._facts(config))

    @classmethod
    def _facts(cls, config: Any) -> dict[str, Any]:
        vision = config.vision_config
        return {
            "video_token_id": config.video_token_id,
            "image_token_id": config.image_token_id,
            "marker_token_ids": (config.vision_start_token_id, config.vision_end_token_id),
            "spatial_merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
        }

    @property
    def placeholder_token_ids(self) -> tuple[int, ...]:
        """Ids that stand for vision in a prompt; a model must never say them."""
        return (self.video_token_id, self.image_token_id, *self.marker_token_ids)

    @abc.abstractmethod
    def video_time_ids(self, num_steps: int, second_per_grid: float) -> tuple[int, ...]:
        """Temporal ids of a video's `num_steps` steps of time, `second_per_grid` seconds apart."""

    def positions(
        self,
        token_ids: Sequence[int],
        video_grids: Sequence[GridShape],
        second_per_grid: Sequence[float],
        *,
        image_grids: Sequence[GridShape] = (),
    ) -> Positions:
        """Positions of a prompt; grids are (time, height, width) in patches before merging, as processors give them.

        Raises ValueError when grids, intervals and placeholders do not match.
        """
        if len(video_grids) != len(second_per_grid):
            raise ValueError(f"{len(video_grids)} video grids but {len(second_per_grid)} intervals")
        videos = [
            block
            for grid, interval in zip(video_grids, second_per_grid, strict=True)
            for block in self._video_blocks(grid, interval)
        ]
        images = [self._block((0,) * grid[0], grid) for grid in image_grids]
        return prompt_positions(token_ids, {self.video_token_id: videos, self.image_token_id: images})

    def _video_blocks(self, grid: GridShape, second_per_grid: float) -> list[VisionGrid]:
        """The runs of placeholders of one video."""
        return [self._block(self.video_time_ids(grid[0], second_per_grid), grid)]

    def _block(self, time_ids: tuple[int, ...], grid: GridShape) -> VisionGrid:
        return VisionGrid(time_ids, grid[1] // self.spatial_merge_size, grid[2] // self.spatial_merge_size)

    def num_visual_tokens(self, grid: GridShape) -> int:
        """Number of placeholders of a grid in patches."""
        time, height, width = grid
        return time * (height // self.spatial_merge_size) * (width // self.spatial_merge_size)

    def video_text(self, grid: GridShape, timestamps_s: Sequence[float]) -> VideoText:
        """How a video of this grid, with frames at these times, stands in a prompt."""
        return VideoText((self.num_visual_tokens(grid),))

    @abc.abstractmethod
    def frames(self, video_processor: Any) -> FrameProcessor:
        """The checkpoint's frame processor; raises ValueError when it does not fit the model."""

    def encode_video(self, model: Any, patches: Tensor, video_grid_thw: Tensor) -> Tensor:
        """Runs the vision tower on patches of consecutive steps of a video: [num_visual_tokens, width].

        `width` is the text model's hidden size, or a multiple of it: what is beyond the first is for deeper layers.
        """
        with torch.inference_mode():
            features = model.model.get_video_features(patches, video_grid_thw, return_dict=True)
            return torch.cat(tuple(features.pooler_output))

    def join_video(self, model: Any, pieces: Sequence[Tensor]) -> Tensor:
        """The features of a whole video from those of its pieces in order."""
        return torch.cat(list(pieces))

    @abc.abstractmethod
    def axis_of_frequency(self, text_config: Any) -> Tensor:
        """Which axis (0 time, 1 height, 2 width) of a position turns each RoPE frequency, int64 [head_dim / 2]."""

    def model_positions(self, positions: Tensor) -> Tensor:
        """Positions [3, num_tokens] in the shape that the text model takes for one sequence."""
        return positions.unsqueeze(1)

    def text_model(self, model: Any) -> Any:
        """The module that maps embeddings to hidden states."""
        return model.model.language_model

    def lm_head(self, model: Any) -> Any:
        """The module that maps hidden states to logits."""
        return model.lm_head

    def drop_vision(self, model: Any) -> None:
        """Frees the vision tower of a model that will only read text and cached keys."""
        model.model.visual = None


def axes_by_section(sections: Sequence[int]) -> Tensor:
    """Axes of frequencies that come in one run for each of time, height and width."""
    return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
