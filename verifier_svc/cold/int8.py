"""Keys and values in eight bits: a quarter of float32 in Redis, and not the same numbers.

Every row of a head has its own scale: value = scale x integer in [-127, 127], scale = largest magnitude / 127. The
error of a number is at most half a scale. Whatever is made from such a copy says so, and is never
taken for the exact one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127


def to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns integers int8 [..., head_dim] and scales float32 [..., 1] of `values` [..., head_dim]."""
    exact = values.float()
    scales = exact.abs().amax(dim=-1, keepdim=True) / _LARGEST
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (exact / scales).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales


def from_int8(integers: Tensor, scales: Tensor, into: Tensor) -> None:
    """Writes integers [..., head_dim] x scales [..., 1] to `into` [..., head_dim], in its dtype."""
    into.copy_(integers.to(torch.float32).mul_(scales))
