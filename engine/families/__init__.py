"""Model families, found by the checkpoint's `model_type`: the few things in which supported models differ.

Every module of this package is looked through for families, so that a new one is a new file and nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from engine.families.base import Family, GridShape, VideoText

__all__ = ["FAMILIES", "Family", "GridShape", "VideoText", "family_of"]


def _families() -> dict[str, type[Family]]:
    found: dict[str, type[Family]] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        for value in vars(importlib.import_module(f"{__name__}.{module}")).values():
            if isinstance(value, type) and issubclass(value, Family) and "model_type" in vars(value):
                found[value.model_type] = value
    return found


FAMILIES = _families()


def family_of(config: Any) -> Family:
    """Returns the family of a transformers config; ValueError names the known ones."""
    model_type = str(getattr(config, "model_type", "unknown"))
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type].from_config(config)
