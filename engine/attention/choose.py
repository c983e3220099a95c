"""Which kernel a device gets."""

from __future__ import annotations

import torch

from engine.attention.base import AttentionKernel
from engine.attention.cpu_canonical import CanonicalKernel
from engine.attention.cpu_split import CpuPrimitives
from engine.attention.cuda_sdpa import CudaPrimitives
from engine.attention.parts import PartsKernel


def choose_kernel(device: torch.device, *, deterministic: bool) -> AttentionKernel:
    """Returns the device's kernel; ValueError when it has none that is deterministic."""
    if deterministic:
        if device.type != "cpu":
            raise ValueError(f"deterministic mode is available on cpu only, not on {device.type}")
        return CanonicalKernel()
    return PartsKernel(CpuPrimitives() if device.type == "cpu" else CudaPrimitives())
