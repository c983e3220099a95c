"""Messages between the service and its decoder processes, over a socket pair. No pickle: either side may be hostile.

request   one line of JSON
reply     kind (1 byte), length of JSON (4), length of raw bytes (8), JSON, raw bytes
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

VALUE, FRAMES, END, FAILED = b"V", b"F", b"E", b"X"
_HEADER = struct.Struct("!cIQ")
MAX_JSON_BYTES = 1 << 20


class WireError(Exception):
    """The other side broke the protocol or went away."""


def send(connection: socket.socket, kind: bytes, value: object, raw: bytes | memoryview = b"") -> None:
    """Sends a reply."""
    text = json.dumps(value).encode()
    connection.sendall(_HEADER.pack(kind, len(text), len(raw)) + text)
    if raw:
        connection.sendall(raw)


def receive(connection: socket.socket, *, max_raw_bytes: int) -> tuple[bytes, Any, bytearray]:
    """Returns a reply. Raises WireError, and TimeoutError by the socket's own timeout."""
    kind, num_text, num_raw = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if num_text > MAX_JSON_BYTES or num_raw > max_raw_bytes:
        raise WireError(f"a reply of {num_text} + {num_raw} bytes")
    try:
        value = json.loads(_exactly(connection, num_text))
    except ValueError as error:
        raise WireError("a reply that is no JSON") from error
    return kind, value, _exactly(connection, num_raw)


def receive_line(connection: socket.socket) -> bytes:
    """Returns the next request, or nothing when the service closed the socket."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            return b""
        line += part
    return bytes(line)


def _exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view, filled = memoryview(data), 0
    while filled < num_bytes:
        num_read = connection.recv_into(view[filled:])
        if num_read == 0:
            raise WireError("the decoder closed its socket")
        filled += num_read
    return data
