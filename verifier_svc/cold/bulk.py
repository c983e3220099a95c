"""Large values to and from one Redis server over a blocking socket, without a copy in between.

redis-py reads a reply into Python bytes of its own, which costs more than the transfer itself. Here a reply's payload
is received where it belongs. A connection that failed in any way is closed: no reply can reach another request.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foveate.store.address import Endpoint, RedisAddress
from foveate.store.errors import Corrupt, Full, Missing, Unreachable

_WINDOW = 4  # requests under way on a connection
_CRLF = b"\r\n"
_MISSING = b"$-1\r\n"
_SOCKET_BUFFER_BYTES = 4 * 1024 * 1024


class Moved(Unreachable):
    """Another node of the cluster has the key now."""


@dataclass(frozen=True)
class Value:
    """A value as it is in Redis: a header, then the payload, which lies in memory of ours."""

    key: str
    header: bytes
    payload: memoryview

    @property
    def num_bytes(self) -> int:
        """Bytes of header and payload."""
        return len(self.header) + len(self.payload)


class BulkConnection:
    """One connection. Used from one thread at a time; unusable after an error."""

    def __init__(self, endpoint: Endpoint, address: RedisAddress, *, timeout_s: float) -> None:
        """Connects and signs in; raises Unreachable."""
        try:
            self._socket = _connect(endpoint, address, timeout_s)
        except OSError as error:
            raise Unreachable(f"Redis at {endpoint} cannot be reached") from error
        self._deadline_s = time.monotonic() + timeout_s
        with self._closing_on_error():
            if address.password is not None:
                user = () if address.username is None else (address.username.encode(),)
                self._simple(b"AUTH", *user, address.password.encode())
            if address.db:
                self._simple(b"SELECT", str(address.db).encode())

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def read(self, values: Sequence[Value], *, deadline_s: float) -> None:
        """Fills the payload of every value from its key, until `deadline_s` on time.monotonic's clock.

        Raises Missing, Corrupt when length or header are not those expected, Unreachable.
        """
        self._deadline_s = deadline_s
        with self._closing_on_error():
            self._send(b"".join(_command(b"GET", one.key.encode()) for one in values[:_WINDOW]))
            for place, value in enumerate(values):
                if place + _WINDOW < len(values):
                    self._send(_command(b"GET", values[place + _WINDOW].key.encode()))
                self._receive_value(value)

    def write(self, values: Sequence[Value], *, ttl_ms: int, deadline_s: float) -> None:
        """Sets every key; `ttl_ms` 0 means for ever. Raises Full, Unreachable."""
        self._deadline_s = deadline_s
        with self._closing_on_error():
            for place, value in enumerate(values):
                self._send_value(value, ttl_ms)
                if place >= _WINDOW:
                    self._expect_ok()
            for _ in range(min(_WINDOW, len(values))):
                self._expect_ok()

    def _send_value(self, value: Value, ttl_ms: int) -> None:
        key = value.key.encode()
        expiry = (b"PX", str(ttl_ms).encode()) if ttl_ms else ()
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (3 + len(expiry), len(key), key, value.num_bytes)
        self._send(head + value.header)
        self._send(value.payload)
        self._send(_CRLF + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in expiry))

    def _receive_value(self, value: Value) -> None:
        expected = b"$%d\r\n" % value.num_bytes
        first = self._receive(len(_MISSING))
        if first == _MISSING:
            raise Missing(f"{value.key} is not there")
        if expected[: len(first)] != first:
            raise _failure(first + self._rest_of_line(), value.key)
        if self._receive(len(expected) - len(first)) != expected[len(first) :]:
            raise Corrupt(f"{value.key} has another length than its manifest says")
        if self._receive(len(value.header)) != value.header:
            raise Corrupt(f"{value.key} holds another chunk than its manifest says")
        self._receive_into(value.payload)
        if self._receive(len(_CRLF)) != _CRLF:
            raise Corrupt(f"{value.key} does not end where it should")

    def _simple(self, *parts: bytes) -> None:
        self._send(_command(*parts))
        self._expect_ok()

    def _expect_ok(self) -> None:
        line = self._receive(1) + self._rest_of_line()
        if not line.startswith(b"+"):
            raise _failure(line, "a write")

    def _rest_of_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and len(line) < 512:
            line += self._receive(1)
        return line

    def _send(self, data: bytes | memoryview) -> None:
        self._socket.settimeout(self._remaining_s())
        self._socket.sendall(data)

    def _receive(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._receive_into(memoryview(data))
        return bytes(data)

    def _receive_into(self, target: memoryview) -> None:
        while target:
            self._socket.settimeout(self._remaining_s())
            num_bytes = self._socket.recv_into(target)
            if num_bytes == 0:
                raise ConnectionResetError("closed by the server")
            target = target[num_bytes:]

    def _remaining_s(self) -> float:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise Unreachable(f"the transfer broke off: {type(error).__name__}") from error
        except BaseException:
            self.close()
            raise


def _command(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def _connect(endpoint: Endpoint, address: RedisAddress, timeout_s: float) -> socket.socket:
    if endpoint.unix_path:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(timeout_s)
            connected.connect(endpoint.unix_path)
        except BaseException:
            connected.close()
            raise
        return connected
    connected = socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    if not address.tls:
        return connected
    try:
        return ssl.create_default_context().wrap_socket(connected, server_hostname=endpoint.host)
    except BaseException:
        connected.close()
        raise


def _failure(line: bytes, what: str) -> Corrupt | Full | Unreachable:
    text = line.decode(errors="replace").strip()
    if text.startswith(("-OOM", "-MISCONF")):
        return Full(text)
    if text.startswith("-WRONGTYPE"):
        return Corrupt(f"{what}: {text}")
    if text.startswith("-MOVED"):
        return Moved(f"{what}: {text}")
    if text.startswith("-"):  # READONLY, LOADING, NOAUTH: another server, or not now
        return Unreachable(f"{what}: {text}")
    return Corrupt(f"{what} is not what its manifest says: {text[:40]!r}")
