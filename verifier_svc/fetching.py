"""Videos by URL, off unless hosts are named: every hop is checked before a connection is made, and stays as checked.

    check     https, a host on the list, no credentials, a port of the list (443 unless the list says another)
    resolve   every address the name has must be public; one that is not refuses the URL
    connect   to the address that was checked, not to the name again: a second answer of DNS changes nothing
    read      bounded in bytes and in seconds, all hops together; a redirect is a new hop and is checked like the first

What a URL led to is never told: only whether it is allowed, and what the server of an allowed host answered.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from foveate.rpc.errors import FoveateError, InvalidArgument, NotFound, ResourceExhausted, Unavailable, invalid
from verifier_svc.media import Media, UploadSpool

FIELD = "spec.url"
MAX_URL_CHARACTERS = 2048
_BLOCK_BYTES = 1 << 16
_RETRY_S = 5.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
Resolve = Callable[[str, int], Sequence[str]]
Connect = Callable[[str, int, float], socket.socket]


@dataclass(frozen=True)
class FetchLimits:
    """What may be fetched. A host is "videos.example", "*.videos.example" (any name below), or either with ":PORT"."""

    hosts: frozenset[str] = frozenset()
    max_bytes: int = 512 * 1024 * 1024
    max_s: float = 60.0
    max_redirects: int = 3


@dataclass(frozen=True)
class _Hop:
    """A checked URL and the address it will be fetched from."""

    url: SplitResult
    host: str
    port: int
    address: str

    @property
    def target(self) -> str:
        """The path and query."""
        return (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")


def resolve(host: str, port: int) -> Sequence[str]:
    """Returns the addresses of a name. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(one[4][0]) for one in found]


def connect_tls(host: str) -> Connect:
    """Returns what connects to an address and proves that it is `host`."""
    context = ssl.create_default_context()

    def connect(address: str, port: int, timeout_s: float) -> socket.socket:
        bare = socket.create_connection((address, port), timeout_s)
        try:
            return context.wrap_socket(bare, server_hostname=host)
        except BaseException:
            bare.close()
            raise

    return connect


class Fetcher:
    """Fetches videos from allowed hosts. Blocking, thread-safe."""

    def __init__(
        self,
        limits: FetchLimits,
        *,
        resolve: Resolve = resolve,
        connector: Callable[[str], Connect] = connect_tls,
    ) -> None:
        self._limits = limits
        self._resolve = resolve
        self._connector = connector

    def fetch(self, url: str) -> Media:
        """Returns the file at `url`; the caller closes it.

        INVALID_ARGUMENT (URL_REFUSED) for what may not be fetched, RESOURCE_EXHAUSTED beyond a bound, NOT_FOUND and
        UNAVAILABLE for what the allowed host answered.
        """
        if not self._limits.hosts:
            raise refused("this server fetches no URLs; upload the file instead")
        deadline_s = time.monotonic() + self._limits.max_s
        for _ in range(self._limits.max_redirects + 1):
            hop = self._check(url)
            with self._answer(hop, deadline_s) as response:
                if response.status not in _REDIRECTS:
                    return self._body(response, deadline_s)
                location = response.getheader("Location")
            if not location:
                raise refused("leads to a redirect without a target")
            url = urljoin(url, location)
        raise refused(f"leads to more than {self._limits.max_redirects} redirects")

    def _check(self, url: str) -> _Hop:
        if len(url) > MAX_URL_CHARACTERS or not url.isascii() or not url.isprintable() or " " in url:
            raise refused(f"must be at most {MAX_URL_CHARACTERS} printable ASCII characters")
        try:
            parts = urlsplit(url)
            port = parts.port or 443
        except ValueError:
            raise refused("is no URL") from None
        host = (parts.hostname or "").rstrip(".").lower()
        if parts.scheme != "https" or not host or parts.username is not None or parts.password is not None:
            raise refused("must be https://HOST/..., without user and password")
        if not self._is_listed(host, port):
            raise refused("is of a host that this server does not fetch from")
        return _Hop(parts, host, port, self._public_address(host, port))

    def _is_listed(self, host: str, port: int) -> bool:
        suffix = "" if port == 443 else f":{port}"
        names = [host, *(f"*.{host.split('.', number)[number]}" for number in range(1, host.count(".") + 1))]
        return any(name + suffix in self._limits.hosts for name in names)

    def _public_address(self, host: str, port: int) -> str:
        try:
            addresses = self._resolve(host, port)
        except OSError:
            raise unavailable("its host has no address now") from None
        if not addresses or not all(is_public(address) for address in addresses):
            raise refused("is of a host that this server does not fetch from")
        return addresses[0]

    @contextlib.contextmanager
    def _answer(self, hop: _Hop, deadline_s: float) -> Iterator[http.client.HTTPResponse]:
        """Asks for a hop. A watchdog ends the connection at the deadline, however slowly bytes drip in."""
        connection = http.client.HTTPSConnection(hop.host, hop.port)
        watchdog: threading.Timer | None = None
        try:
            sock = self._connector(hop.host)(hop.address, hop.port, max(0.001, deadline_s - time.monotonic()))
            connection.sock = sock
            watchdog = threading.Timer(max(0.0, deadline_s - time.monotonic()), _cut, (sock,))
            watchdog.daemon = True
            watchdog.start()
            connection.request("GET", hop.target, headers={"Accept-Encoding": "identity", "User-Agent": "foveate"})
            yield connection.getresponse()
        except FoveateError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= deadline_s:
                raise self._too_slow() from error
            raise unavailable("its host does not answer as it should") from error
        finally:
            if watchdog is not None:
                watchdog.cancel()
            connection.close()

    def _body(self, response: http.client.HTTPResponse, deadline_s: float) -> Media:
        _check_status(response.status)
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise refused("leads to a compressed body")
        announced = response.length or 0
        spool = UploadSpool(max_bytes=self._limits.max_bytes, announced_bytes=announced)
        try:
            while block := response.read1(_BLOCK_BYTES):
                spool.append(block, spool.num_bytes)
            if time.monotonic() >= deadline_s:  # what the watchdog cut looks like an end
                raise self._too_slow()
            if announced and spool.num_bytes != announced:
                raise unavailable("its host broke off")
            media = spool.finish()
        except BaseException:
            spool.discard()
            raise
        media.field_path = FIELD
        return media

    def _too_slow(self) -> ResourceExhausted:
        limit = f"{self._limits.max_s:g}"
        return ResourceExhausted(
            f"fetching the video takes longer than {limit} s", reason="FETCH_TOO_LONG", metadata={"limit": limit}
        )


def is_public(address: str) -> bool:
    """Tells whether an address is of the public internet; one that wraps another address is judged by that one too."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in ipaddress.ip_network("64:ff9b::/96"):
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(one is not None and not _is_global(one) for one in inner):
            return False
    return _is_global(ip)


def _is_global(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_loopback)


def refused(description: str) -> InvalidArgument:
    """Returns the error of a URL that may not be fetched."""
    error = invalid(FIELD, description)
    error.reason = "URL_REFUSED"
    return error


def unavailable(description: str) -> Unavailable:
    """Returns the error of an allowed host in trouble."""
    return Unavailable(f"the URL cannot be fetched: {description}", reason="FETCH_FAILED", retry_after_s=_RETRY_S)


def _check_status(status: int) -> None:
    if status in (404, 410):
        raise NotFound("no file at the URL", reason="URL_NOT_FOUND", resource=("media", "url"))
    if status >= 500 or status == 429:
        raise unavailable(f"its host answered {status}")
    if status != 200:
        raise refused(f"is answered with {status}")


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
