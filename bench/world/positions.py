"""Rotary positions by the rule that Qwen2.5-VL was released with."""

from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS_PER_SECOND = 2


@dataclass(frozen=True)
class Grid:
    """A video's patches: temporal, height and width counts before merging 2 x 2, and the seconds between pairs."""

    t: int
    h: int
    w: int
    second_per_grid: float


def text_positions(start: int, num_tokens: int) -> Tensor:
    """[3, num_tokens]"""
    return (start + torch.arange(num_tokens)).expand(3, -1)


def video_positions(start: int, grid: Grid, *, merge: int = 2) -> Tensor:
    """Time, row and column ids [3, num_visual_tokens]."""
    h, w = grid.h // merge, grid.w // merge
    time = (torch.arange(grid.t) * grid.second_per_grid * TOKENS_PER_SECOND).long()
    rows, cols = torch.arange(h), torch.arange(w)
    ids = torch.stack(
        [time.repeat_interleave(h * w), rows.repeat_interleave(w).repeat(grid.t), cols.repeat(grid.t * h)]
    )
    return ids + start


def prompt_positions(input_ids: Tensor, video_token_id: int, grid: Grid) -> Tensor:
    """Positions [3, num_tokens] of a prompt with one video: text goes on at the largest id so far plus one."""
    is_video = input_ids == video_token_id
    first, num_visual = int(is_video.nonzero()[0]), int(is_video.sum())
    video = video_positions(first, grid)
    assert video.shape[1] == num_visual, "the grid does not match the number of visual tokens"
    after = text_positions(int(video.max()) + 1, len(input_ids) - first - num_visual)
    return torch.cat([text_positions(0, first), video, after], dim=1)
