"""What a model family has to say about itself."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from engine.positions import Positions, VisionGrid, prompt_positions


@dataclass(frozen=True)
class Family(abc.ABC):
    """Special ids and geometry from a checkpoint's config, and how the family places and encodes vision blocks."""

    model_type: ClassVar[str]

    video_token_id: int
    image_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
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
            "vision_start_token_id": config.vision_start_token_id,
            "vision_end_token_id": config.vision_end_token_id,
            "spatial_merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
        }

    @property
    def placeholder_token_ids(self) -> tuple[int, ...]:
        """Ids that stand for vision in a prompt; a model must never say them."""
        return (self.video_token_id, self.image_token_id, self.vision_start_token_id, self.vision_end_token_id)

    @abc.abstractmethod
    def video_time_ids(self, num_steps: int, second_per_grid: float) -> tuple[int, ...]:
        """Temporal ids of a video's `num_steps` steps of time, `second_per_grid` seconds apart."""

    def positions(
        self,
        token_ids: Sequence[int],
        video_grids: Sequence[tuple[int, int, int]],
        second_per_grid: Sequence[float],
        *,
        image_grids: Sequence[tuple[int, int, int]] = (),
    ) -> Positions:
        """Positions of a prompt; grids are (time, height, width) in patches before merging, as processors give them.

        Raises ValueError when grids, intervals and placeholders do not match.
        """
        if len(video_grids) != len(second_per_grid):
            raise ValueError(f"{len(video_grids)} video grids but {len(second_per_grid)} intervals")
        videos = [
            self._grid(self.video_time_ids(grid[0], interval), grid)
            for grid, interval in zip(video_grids, second_per_grid, strict=True)
        ]
        images = [self._grid((0,) * grid[0], grid) for grid in image_grids]
        return prompt_positions(token_ids, {self.video_token_id: videos, self.image_token_id: images})

    def num_visual_tokens(self, grid: tuple[int, int, int]) -> int:
        """Number of placeholders of a grid in patches."""
        time, height, width = grid
        return time * (height // self.spatial_merge_size) * (width // self.spatial_merge_size)

    def encode_video(self, model: Any, pixel_values_videos: Tensor, video_grid_thw: Tensor) -> Tensor:
        """Runs the vision tower on patches of one or several videos: [num_visual_tokens, hidden]."""
        with torch.inference_mode():
            features = model.model.get_video_features(pixel_values_videos, video_grid_thw, return_dict=True)
            return torch.cat(tuple(features.pooler_output))

    def text_model(self, model: Any) -> Any:
        """The module that maps embeddings to hidden states."""
        return model.model.language_model

    def lm_head(self, model: Any) -> Any:
        """The module that maps hidden states to logits."""
        return model.lm_head

    def drop_vision(self, model: Any) -> None:
        """Frees the vision tower of a model that will only read text and cached keys."""
        model.model.visual = None

    def _grid(self, time_ids: tuple[int, ...], grid: tuple[int, int, int]) -> VisionGrid:
        return VisionGrid(time_ids, grid[1] // self.spatial_merge_size, grid[2] // self.spatial_merge_size)
