"""Where the embedded default model is: inside an installed package, or in the repository of a checkout."""

from __future__ import annotations

from pathlib import Path

from foveate.rpc.errors import NotFound

DEFAULT_CHECKPOINT = "tiny-qwen2_5-vl"
_PACKAGE = Path(__file__).parent


def default_checkpoint() -> Path:
    """Returns the folder of the embedded tiny model. Raises NotFound when this installation has none."""
    places = (_PACKAGE / "checkpoints" / DEFAULT_CHECKPOINT, _PACKAGE.parent / "checkpoints" / DEFAULT_CHECKPOINT)
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise NotFound(
        f"the embedded model {DEFAULT_CHECKPOINT} is not installed; name a checkpoint folder with --model",
        reason="CHECKPOINT_NOT_FOUND",
        resource=("checkpoint", DEFAULT_CHECKPOINT),
    )
