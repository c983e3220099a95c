"""CPU primitives: torch's flash kernel, the only CPU call that also returns the log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class CpuPrimitives:
    """Flash attention for CPUs; it reads the keys once per 32 folded rows."""

    name = "cpu-split"

    def unmasked(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        out, lse = _flash(query, keys, values, scale=scaling)
        return out, lse

    def masked(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = _flash(query, keys, values, attn_mask=bias, scale=scaling)
        return out, lse
