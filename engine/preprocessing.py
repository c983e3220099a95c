"""Whether two models of a family look at the same patches: what turns frames into patches, as one digest."""

from __future__ import annotations

import hashlib
import json

from engine.frames import FrameProcessor

# Limits on size are left out: they say how many patches a video gets, which the patches themselves tell. A family whose
# tower takes one size only sets `frame_size`.
_SETTINGS = (
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
    "do_convert_rgb",
    "frame_size",
)


def patches_digest(frames: FrameProcessor) -> str:
    """Returns 64 hex digits that are equal for frame processors whose patches are interchangeable."""
    settings = frames.settings()
    chosen = {name: settings.get(name) for name in _SETTINGS}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True, default=str).encode()).hexdigest()
