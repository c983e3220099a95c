"""Identity of a context: SHA-256 over everything that its keys and values depend on.

Each part is framed by its name and length, so that no two descriptions can read the same. The whole hash is the name:
nothing is truncated, and pixels alone are never an identity (equal frames can stand for different rates and grids).
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from foveate.rpc.errors import invalid
from verifier_svc.timeline import FrameSampling

CONTEXT_NAME = re.compile(r"contexts/([0-9a-f]{64})")
# Changes whenever the rules that give tokens their 3-D positions change (docs/positions.md).
POSITION_ALGORITHM = "release-1"
# Changes whenever frames are picked or put upright in another way.
FRAME_ALGORITHM = "nearest-1"
_LIBRARIES = ("foveate", "torch", "torchvision", "transformers", "av")


@dataclass(frozen=True)
class ModelIdentity:
    """The part of a context's identity that is the same for every video of this process."""

    model_fingerprint: str
    dtype: str
    deterministic: bool
    processor_settings: Mapping[str, Any]
    prompt_token_ids: Sequence[int]

    def context_id(self, *, media_sha256: str, sampling: FrameSampling, tenant: str = "") -> str:
        """Returns 64 hex digits. Tenants never share a context, not even of the same video."""
        digest = hashlib.sha256()
        for name, value in (*self._parts(), *_media_parts(media_sha256, sampling), ("tenant", tenant.encode())):
            for field in (name.encode(), value):
                digest.update(struct.pack(">Q", len(field)))
                digest.update(field)
        return digest.hexdigest()

    def _parts(self) -> list[tuple[str, bytes]]:
        settings = json.dumps(self.processor_settings, sort_keys=True, default=str)
        return [
            ("model", self.model_fingerprint.encode()),
            ("dtype", self.dtype.encode()),
            ("deterministic", str(self.deterministic).encode()),
            ("processor", settings.encode()),
            ("prompt_token_ids", array("q", self.prompt_token_ids).tobytes()),
            ("positions", POSITION_ALGORITHM.encode()),
            ("frames", FRAME_ALGORITHM.encode()),
            *((library, version(library).encode()) for library in _LIBRARIES),
        ]


def context_name(context_id: str) -> str:
    """Returns the resource name."""
    return f"contexts/{context_id}"


def parse_context_name(name: str, field_path: str) -> str:
    """Returns the id in a resource name; INVALID_ARGUMENT when it is malformed."""
    match = CONTEXT_NAME.fullmatch(name)
    if match is None:
        raise invalid(field_path, 'must be "contexts/" and 64 hexadecimal digits')
    return match.group(1)


def _media_parts(media_sha256: str, sampling: FrameSampling) -> list[tuple[str, bytes]]:
    return [
        ("media", media_sha256.encode()),
        ("fps", struct.pack(">d", sampling.fps)),
        ("max_frames", struct.pack(">Q", sampling.max_frames)),
        ("stored_fps", b"" if sampling.stored_fps is None else struct.pack(">d", sampling.stored_fps)),
    ]
