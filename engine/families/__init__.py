"""Model families, found by the checkpoint's `model_type`: the few things in which supported models differ."""

from __future__ import annotations

from typing import Any

from engine.families.base import Family
from engine.families.qwen2_5_vl import Qwen25VlFamily
from engine.families.qwen2_vl import Qwen2VlFamily

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, type[Family]] = {
    Qwen25VlFamily.model_type: Qwen25VlFamily,
    Qwen2VlFamily.model_type: Qwen2VlFamily,
}


def family_of(config: Any) -> Family:
    """Returns the family of a transformers config; ValueError names the known ones."""
    model_type = str(getattr(config, "model_type", "unknown"))
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type].from_config(config)
