"""Records in a frame: magic, kind, length, payload, checksum. No record is ever taken for one of another kind.

offset 0   8 bytes   magic with the format's version
       8   8 bytes   kind, padded with zeros
      16   8 bytes   length of the payload, big-endian
      24   n bytes   payload: a serialized message of records.proto
    24+n  32 bytes   BLAKE2b-256 of everything before
"""

from __future__ import annotations

import hashlib
import struct
from enum import Enum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from foveate.store.errors import Corrupt

MAGIC = b"FVREC\0\0\1"
MAX_RECORD_BYTES = 64 * 1024 * 1024
_HEAD = struct.Struct(">8s8sQ")
_DIGEST_BYTES = 32

MessageT = TypeVar("MessageT", bound=Message)


class Kind(Enum):
    """What a record is; the value is in its frame."""

    CONTEXT = b"CONTEXT\0"
    MANIFEST = b"MANIFEST"
    CONVERSATION = b"CONVERS\0"
    SERVICE = b"SERVICE\0"


def pack(kind: Kind, message: Message) -> bytes:
    """Returns the framed record."""
    payload = message.SerializeToString(deterministic=True)
    framed = _HEAD.pack(MAGIC, kind.value, len(payload)) + payload
    return framed + _digest(framed)


def unpack(kind: Kind, data: bytes, into: type[MessageT]) -> MessageT:
    """Returns the record. Raises Corrupt unless it is whole, undamaged and of this kind."""
    if not _HEAD.size + _DIGEST_BYTES <= len(data) <= MAX_RECORD_BYTES:
        raise Corrupt(f"a record of {len(data)} bytes cannot be one of ours")
    magic, found, num_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC or found != kind.value or len(data) != _HEAD.size + num_bytes + _DIGEST_BYTES:
        raise Corrupt(f"a record is not a whole {kind.name} of this version")
    if _digest(data[:-_DIGEST_BYTES]) != data[-_DIGEST_BYTES:]:
        raise Corrupt(f"a {kind.name} record is damaged")
    message = into()
    try:
        message.ParseFromString(data[_HEAD.size : -_DIGEST_BYTES])
    except DecodeError as error:
        raise Corrupt(f"a {kind.name} record cannot be parsed") from error
    return message


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
