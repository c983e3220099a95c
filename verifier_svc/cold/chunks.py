"""A chunk of a cold copy: a header that says whose it is, then the payload.

    offset 0    8 bytes  magic with the format's version
           8   32 bytes  context id
          40    1 byte   form (ContextSource)
          41    8 bytes  generation
          49    4 bytes  index of the chunk
          53    8 bytes  length of the payload
          61   16 bytes  xxh3_128 of the payload
          77    3 bytes  zeros

A reader knows all of it beforehand from the manifest, so a foreign, swapped, truncated or flipped chunk cannot pass.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from foveate.context_source import ContextSource
from foveate.store import keys

MAGIC = b"FVCHNK\0\1"
# Redis refuses values over 512 MB; from 1 MiB on, larger chunks no longer make a transfer faster.
CHUNK_BYTES = 2 * 1024 * 1024
_HEADER = struct.Struct(">8s32sBQIQ16s3x")
HEADER_BYTES = _HEADER.size
_FORM_NAMES = {
    ContextSource.COLD_KV: "kv",
    ContextSource.COLD_KV_INT8: "kv8",
    ContextSource.COLD_EMBEDDINGS: "embeddings",
    ContextSource.MEDIA: "media",
}


@dataclass(frozen=True)
class CopyName:
    """One writer's copy of a context in one form."""

    context_id: str
    form: ContextSource
    generation: int

    @property
    def manifest_key(self) -> str:
        """Where the copy's manifest is; the newest generation's."""
        return keys.manifest(self.context_id, form_name(self.form))

    def chunk_key(self, index: int) -> str:
        """Where a chunk is."""
        return keys.chunk(self.context_id, form_name(self.form), self.generation, index)

    def header(self, index: int, num_bytes: int, checksum: bytes) -> bytes:
        """Returns what precedes a chunk's payload."""
        return _HEADER.pack(
            MAGIC, bytes.fromhex(self.context_id), self.form, self.generation, index, num_bytes, checksum
        )


def form_name(form: ContextSource) -> str:
    """The word for a form in keys and counters."""
    return _FORM_NAMES[form]


def form_of(name: str) -> ContextSource:
    """Returns the form with this word; KeyError when there is none."""
    return {word: form for form, word in _FORM_NAMES.items()}[name]


def checksum(payload: memoryview) -> bytes:
    """Returns the 16 bytes of xxh3_128: against damage, not against forgery."""
    return xxhash.xxh3_128_digest(payload)
