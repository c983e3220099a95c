"""CUDA primitives: torch's fused kernels where no mask is needed, plain matrix products for the few masked keys."""

from __future__ import annotations

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default


class CudaPrimitives:
    """FlashAttention for half precision, memory-efficient attention for float32."""

    name = "cuda-sdpa"

    def unmasked(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        num_rows, head_dim = query.shape[2:]
        if query.dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256:
            out, lse = _flash(query, keys, values, scale=scaling)[:2]
        else:
            out, lse = _efficient(query, keys, values, None, True, scale=scaling)[:2]
        return out, lse[:, :, :num_rows]  # the efficient kernel pads the row dimension

    def masked(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        return plain_masked(query, keys, values, scaling, bias)


def plain_masked(query: Tensor, keys: Tensor, values: Tensor, scaling: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Attention by matrix products with float32 scores, for few keys; shapes as in `Primitives.masked`."""
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * scaling + bias.float()
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).to(values.dtype)
    return torch.matmul(weights, values), lse
