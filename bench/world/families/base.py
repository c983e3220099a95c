"""What differs between the families of tiny models: their parts, their processors, their positions."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.world.facts import CELLS
from bench.world.model import TOKEN_ID, ModelSize
from bench.world.positions import text_positions


@dataclass(frozen=True)
class ChatFormat:
    """The chat template's text around a video and between turns."""

    before_video: str
    after_video: str
    to_assistant: str
    to_user: str
    before_later_question: str = ""  # plain text, so that it is tokenised with the question


class WorldFamily(abc.ABC):
    """One structure of model. A "step" is what one group of nine visual tokens shows: a frame pair of the world."""

    name: str  # the checkpoints' model_type
    chat: ChatFormat
    frame_stride: int  # 1: the model reads every frame of the world, 2: the first one of each pair
    usual_intervals: tuple[int, ...]  # temporal positions between steps that the model meets in use
    sees_motion = True  # the vision tower is shown two frames at once

    @abc.abstractmethod
    def build_config(self, size: ModelSize) -> Any:
        """A config of the real class."""

    @abc.abstractmethod
    def build_model(self, size: ModelSize) -> Any:
        """An untrained model of the real class."""

    @abc.abstractmethod
    def build_processor(self) -> Any:
        """The real processor with the world's tokenizer."""

    @abc.abstractmethod
    def patches(self, frames: NDArray[np.float32]) -> Tensor:
        """Frames [2 * num_steps, 48, 48, 3] of one video as its processor hands them to the vision tower."""

    @abc.abstractmethod
    def encode(self, model: Any, patches: Tensor, num_rows: int) -> Tensor:
        """Visual embeddings [num_rows * num_visual_tokens, hidden] of equally long videos, given one after another."""

    @abc.abstractmethod
    def vision_parts(self, model: Any) -> nn.ModuleDict:
        """Everything that is not the text model."""

    @abc.abstractmethod
    def video_positions(self, start: int, num_steps: int, interval: float) -> Tensor:
        """Time, row and column positions [3, num_visual_tokens]; interval: temporal positions between steps."""

    def num_visual_tokens(self, num_steps: int) -> int:
        return num_steps * CELLS

    def interval(self, second_per_step: float) -> float:
        """Temporal positions between steps, as the released models count them; by default time is not told."""
        return 1.0

    def cell_features(self, features: Tensor, num_rows: int) -> Tensor:
        """The visual embeddings that show cells, in order of rows, steps and cells: [num_rows * num_cells, hidden]."""
        return features

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Visual embeddings of a whole video from those of its consecutive parts."""
        return torch.cat(list(pieces))

    def prompt_positions(self, input_ids: Tensor, *, num_steps: int, second_per_step: float) -> Tensor:
        """Positions [3, num_tokens] of a prompt with one video: text goes on at the largest id so far plus one."""
        is_video = input_ids == TOKEN_ID["<|video_pad|>"]
        first, num_visual = int(is_video.nonzero()[0]), int(is_video.sum())
        video = self.video_positions(first, num_steps, self.interval(second_per_step))
        if video.shape[1] != num_visual:
            raise ValueError(f"{num_visual} visual tokens do not make {num_steps} steps")
        after = text_positions(int(video.max()) + 1, len(input_ids) - first - num_visual)
        return torch.cat([text_positions(0, first), video, after], dim=1)

    def position_ids(self, positions: Tensor) -> Tensor:
        """Positions [3, num_rows, num_tokens] in the shape that the text model takes."""
        return positions
