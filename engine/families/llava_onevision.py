"""LLaVA-OneVision: frames seen one by one, pooled, in one line of positions, closed by one newline token.

A frame of 27 x 27 patches becomes 14 x 14 visual tokens. The tower's learnt positions hold for one size of frame, so
every frame is resized to it, whatever its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.families.base import Family, GridShape
from engine.frames import FrameProcessor, Grid, RgbFrames, as_video, cannot_look_at
from engine.positions import Positions, text_positions

_POOLING = 2


@dataclass(frozen=True)
class LlavaOnevisionFamily(Family):
    """LLaVA-OneVision over a Qwen2 text model."""

    model_type: ClassVar[str] = "llava_onevision"

    image_size: int
    patch_size: int

    @classmethod
    def _facts(cls, config: Any) -> dict[str, Any]:
        vision = config.vision_config
        if config.text_config.model_type != "qwen2":
            raise ValueError(f"a llava_onevision over {config.text_config.model_type!r} is not supported; qwen2 is")
        return {
            "video_token_id": config.video_token_id,
            "image_token_id": config.image_token_id,
            "marker_token_ids": (),
            "spatial_merge_size": _POOLING,
            "temporal_patch_size": 1,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
        }

    def video_time_ids(self, num_steps: int, second_per_grid: float) -> tuple[int, ...]:
        return tuple(range(num_steps))

    def positions(
        self,
        token_ids: Sequence[int],
        video_grids: Sequence[GridShape],
        second_per_grid: Sequence[float],
        *,
        image_grids: Sequence[GridShape] = (),
    ) -> Positions:
        """One position a token, visual or not; grids must account for all placeholders, as in every family."""
        num_visual = sum(map(self.num_visual_tokens, (*video_grids, *image_grids)))
        placeholders = sum(token_id in (self.video_token_id, self.image_token_id) for token_id in token_ids)
        if num_visual != placeholders or len(video_grids) != len(second_per_grid):
            raise ValueError(f"grids of {num_visual} visual tokens for {placeholders} placeholders in the prompt")
        return Positions(text_positions(0, len(token_ids)), len(token_ids))

    def num_visual_tokens(self, grid: GridShape) -> int:
        time, height, width = grid
        return time * -(-height // _POOLING) * -(-width // _POOLING) + 1

    def frames(self, video_processor: Any) -> FrameProcessor:
        return _LlavaFrames(video_processor, self.image_size, self.patch_size)

    def encode_video(self, model: Any, patches: Tensor, video_grid_thw: Tensor) -> Tensor:
        num_frames, rows, columns = video_grid_thw[0].tolist()
        size = self.patch_size
        pixels = patches.view(num_frames, rows, columns, 3, size, size).permute(0, 3, 1, 4, 2, 5)
        config = model.config
        with torch.inference_mode():
            features: Tensor = model.model.get_video_features(
                pixels.reshape(1, num_frames, 3, rows * size, columns * size),
                vision_feature_layer=config.vision_feature_layer,
                vision_feature_select_strategy=config.vision_feature_select_strategy,
                return_dict=True,
            ).pooler_output[0]
            return features[:-1]  # the newline closes the whole video, not this piece of it

    def join_video(self, model: Any, pieces: Sequence[Tensor]) -> Tensor:
        newline = model.model.image_newline.detach().to(pieces[0])
        return torch.cat([*pieces, newline.unsqueeze(0)])

    def axis_of_frequency(self, text_config: Any) -> Tensor:
        return torch.zeros(text_config.hidden_size // text_config.num_attention_heads // 2, dtype=torch.int64)

    def model_positions(self, positions: Tensor) -> Tensor:
        return positions[:1]

    def drop_vision(self, model: Any) -> None:
        model.model.vision_tower = None
        model.model.multi_modal_projector = None


class _LlavaFrames(FrameProcessor):
    """LlavaOnevisionVideoProcessor, its frames cut into the patches that the tower's first convolution reads."""

    temporal_patch = 1

    def __init__(self, video_processor: Any, image_size: int, patch_size: int) -> None:
        super().__init__(video_processor)
        size = video_processor.size
        if (size["height"], size["width"]) != (image_size, image_size):
            raise ValueError(f"the video processor makes frames of {dict(size)}, the tower takes {image_size}")
        self._patch_size = patch_size
        self._side = image_size // patch_size

    def settings(self) -> dict[str, Any]:
        size = self._side * self._patch_size
        return {**super().settings(), "patch_size": self._patch_size, "frame_size": size}

    def plan(self, *, num_frames: int, height: int, width: int) -> Grid:
        if height < 1 or width < 1:
            raise cannot_look_at(height, width)
        return Grid(num_frames, self._side, self._side)

    def process(self, frames: RgbFrames, *, num_frames_of_video: int) -> tuple[Tensor, Grid]:
        output = self._processor(
            videos=[as_video(frames)], do_sample_frames=False, return_metadata=False, return_tensors="pt"
        )
        pixels = output["pixel_values_videos"][0]  # [num_frames, 3, height, width]
        side, size = self._side, self._patch_size
        # The convolution's stride leaves out what is beyond the last whole patch.
        cut = pixels[:, :, : side * size, : side * size].reshape(-1, 3, side, size, side, size)
        patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, 3 * size * size)
        return patches, Grid(pixels.shape[0], side, side)
