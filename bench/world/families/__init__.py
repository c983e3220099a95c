"""The model families that are trained in the world, by the `model_type` of their checkpoints."""

import json
from os import PathLike
from pathlib import Path

from bench.world.families.base import ChatFormat, WorldFamily
from bench.world.families.llava_onevision import LlavaOnevision
from bench.world.families.qwen2_5_vl import Qwen25Vl
from bench.world.families.qwen2_vl import Qwen2Vl

__all__ = ["FAMILIES", "ChatFormat", "LlavaOnevision", "Qwen2Vl", "Qwen25Vl", "WorldFamily", "family_of"]

FAMILIES: dict[str, WorldFamily] = {family.name: family for family in (Qwen25Vl(), Qwen2Vl(), LlavaOnevision())}


def family_of(checkpoint: str | PathLike[str]) -> WorldFamily:
    """The family of a checkpoint folder."""
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    return FAMILIES[config["model_type"]]
