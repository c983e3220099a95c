"""Where the embedded default model is: inside an installed package, or in the repository of a checkout."""

from __future__ import annotations

from pathlib import Path

from foveate.rpc.errors import NotFound

DEFAULT_CHECKPOINT = "tiny-qwen2_5-vl"
SMALL_CHECKPOINT = "tiny-qwen2_5-vl-draft"
_PACKAGE = Path(__file__).parent


def default_checkpoint() -> Path:
    """Returns the folder of the embedded tiny model. Raises NotFound when this installation has none."""
    return _embedded(DEFAULT_CHECKPOINT)


def small_checkpoint() -> Path:
    """Returns the folder of the embedded smaller model of its family. Raises NotFound."""
    return _embedded(SMALL_CHECKPOINT)


def _embedded(name: str) -> Path:
    places = (_PACKAGE / "checkpoints" / name, _PACKAGE.parent / "checkpoints" / name)
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise NotFound(
        f"the embedded model {name} is not installed; name a checkpoint folder with --model",
        reason="CHECKPOINT_NOT_FOUND",
        resource=("checkpoint", name),
    )
