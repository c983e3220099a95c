"""Who may connect, and how both sides know each other.

    between services   TLS; with a client CA also mutual: a peer without a certificate of that CA gets no connection
    public side        TLS and API keys: `authorization: Bearer KEY` or `x-api-key: KEY`; the key names the tenant

A server keeps the SHA-256 of its keys only, so that its file, its memory and its logs hold nothing to steal.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from foveate.rpc.errors import Unauthenticated

_TENANT = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,61}[a-z0-9])?")
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ServerTls:
    """PEM files of a server; `client_ca` makes clients show a certificate of that CA."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Reads the files. Raises OSError."""
        chain = [(self.key.read_bytes(), self.certificate.read_bytes())]
        client_ca = None if self.client_ca is None else self.client_ca.read_bytes()
        return grpc.ssl_server_credentials(chain, client_ca, require_client_auth=client_ca is not None)


@dataclass(frozen=True)
class ClientTls:
    """PEM files of a client: the CA that servers are checked against (None: the system's), and its own certificate.

    `server_name` is the name a server's certificate must carry, when it is not the one that is connected to.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a certificate without its key."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client certificate needs its key, and a key its certificate")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))

    def options(self) -> tuple[tuple[str, str], ...]:
        """Returns the channel's options."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


class ApiKeys:
    """Tenants by the SHA-256 of their keys."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._tenants = dict(tenants)

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Reads lines of `TENANT SHA256_HEX`; `#` starts a comment. Raises OSError, or ValueError naming the line."""
        tenants: dict[str, str] = {}
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            is_good = len(words) == 2 and _TENANT.fullmatch(words[0]) and _SHA256_HEX.fullmatch(words[1])
            if not is_good:
                raise ValueError(f"{path}, line {number}: not TENANT SHA256_HEX (foveate new-key makes one)")
            tenants[words[1]] = words[0]
        if not tenants:
            raise ValueError(f"{path} has no key: nobody could ask anything")
        return cls(tenants)

    def tenant_of(self, metadata: Mapping[str, str]) -> str:
        """Returns the tenant of a call's key. Raises Unauthenticated; never says whether a key was nearly right."""
        key = _presented(metadata)
        digest = digest_of(key)
        found = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(known, digest)]
        if not key or not found:
            how = "authorization: Bearer KEY, or x-api-key: KEY"
            raise Unauthenticated(f"an API key is needed ({how})" if not key else "the API key is not known")
        return found[0]


def _presented(metadata: Mapping[str, str]) -> str:
    scheme, _, token = metadata.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return metadata.get("x-api-key", "").strip()


def digest_of(key: str) -> str:
    """Returns what a server keeps of a key. A long random key needs no slow hash."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """Returns a key of 192 random bits."""
    return f"fov_{secrets.token_urlsafe(24)}"


def is_loopback(address: str) -> bool:
    """Tells whether "host:port" or "unix:PATH" can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    return address.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")
