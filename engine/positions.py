"""3-D RoPE positions of Qwen2-VL and Qwen2.5-VL by the rule the models were trained with.

Text advances all three axes (time, height, width) together; a vision block spans a grid; text after it starts at one
more than the largest position so far on any axis. Libraries disagree on that last step and keep the result in module
state, so positions are computed here and passed explicitly to every forward. Source: Qwen2-VL (arXiv 2409.12191,
section 2.1) and Qwen2.5-VL (arXiv 2502.13923, section 2.1.2: absolute time), as in the models' first release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """Positions of a prompt, int64 [3 (time, height, width), num_tokens], and that of the next text token."""

    ids: Tensor
    next_position: int


@dataclass(frozen=True)
class VisionGrid:
    """A vision block: (time, height, width) in tokens after merging, and the temporal id of each step of time."""

    time_ids: tuple[int, ...]
    height: int
    width: int

    @property
    def num_tokens(self) -> int:
        """Number of placeholders the block takes in the prompt."""
        return len(self.time_ids) * self.height * self.width

    def ids(self) -> Tensor:
        """Positions relative to the block's start, int64 [3, num_tokens]."""
        time = torch.tensor(self.time_ids, dtype=torch.int64)
        axes = torch.meshgrid(time, torch.arange(self.height), torch.arange(self.width), indexing="ij")
        return torch.stack(axes).reshape(3, -1)


def time_ids(num_steps: int, second_per_grid: float | None, tokens_per_second: float) -> tuple[int, ...]:
    """Temporal ids of a video's steps: floor(step * seconds per step * tokens per second), or the plain step.

    In float32, as the models were trained: 0.1 * 10 must not become 0.9999.
    """
    steps = torch.arange(num_steps)
    if second_per_grid is None:
        return tuple(steps.tolist())
    interval = torch.tensor(second_per_grid, dtype=torch.float32)
    return tuple((steps * interval * tokens_per_second).long().tolist())


def text_positions(start: int, num_tokens: int) -> Tensor:
    """Positions of text from `start` on, int64 [3, num_tokens]."""
    return torch.arange(start, start + num_tokens, dtype=torch.int64).expand(3, num_tokens)


def prompt_positions(token_ids: Sequence[int], placeholders: dict[int, Sequence[VisionGrid]]) -> Positions:
    """Returns the positions of a prompt whose vision blocks are runs of placeholder ids.

    `placeholders` maps a placeholder id (video, image) to its blocks in order of appearance. Raises ValueError when a
    run is shorter than its block, or when blocks are missing or left over.
    """
    pending = {token_id: list(grids) for token_id, grids in placeholders.items()}
    pieces: list[Tensor] = []
    index, text_start, position = 0, 0, 0
    while index < len(token_ids):
        token_id = token_ids[index]
        if token_id not in pending:
            index += 1
            continue
        position = _add_text(pieces, position, index - text_start)
        grid = _next_grid(pending, token_ids, index)
        block = grid.ids() + position
        pieces.append(block)
        position = int(block.max()) + 1
        index += grid.num_tokens
        text_start = index
    position = _add_text(pieces, position, index - text_start)
    if any(pending.values()):
        raise ValueError("more vision grids than vision blocks in the prompt")
    return Positions(torch.cat(pieces, dim=1) if pieces else text_positions(0, 0), position)


def _add_text(pieces: list[Tensor], position: int, num_tokens: int) -> int:
    if num_tokens:
        pieces.append(text_positions(position, num_tokens))
    return position + num_tokens


def _next_grid(pending: dict[int, list[VisionGrid]], token_ids: Sequence[int], index: int) -> VisionGrid:
    token_id = token_ids[index]
    if not pending[token_id]:
        raise ValueError(f"no vision grid for the block at token {index}")
    grid = pending[token_id].pop(0)
    run = token_ids[index : index + grid.num_tokens]
    if len(run) < grid.num_tokens or any(other != token_id for other in run):
        raise ValueError(f"the vision block at token {index} has fewer placeholders than its grid's {grid.num_tokens}")
    return grid
