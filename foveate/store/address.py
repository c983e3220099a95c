"""Where Redis is, from one URL.

redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]           one server; rediss:// with TLS; unix:///PATH[?db=N] a socket
redis+sentinel://[..@]HOST[:PORT],HOST../SERVICE[/DB]  the master that the sentinels name
redis+cluster://[..@]HOST[:PORT],HOST..                a cluster
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import parse_qs, unquote, urlsplit

REDIS_PORT = 6379
SENTINEL_PORT = 26379


class Topology(Enum):
    """How the server is found."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True)
class Endpoint:
    """One server: a socket's path, or host and port."""

    host: str = ""
    port: int = REDIS_PORT
    unix_path: str = ""

    def __str__(self) -> str:
        return self.unix_path or f"{self.host}:{self.port}"


@dataclass(frozen=True)
class RedisAddress:
    """A parsed URL; its text without the password is `str(address)`."""

    topology: Topology
    nodes: tuple[Endpoint, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    service: str = ""
    tls: bool = False

    def __str__(self) -> str:
        where = ",".join(map(str, self.nodes))
        return f"{self.topology.value} {where}" + (f" {self.service}" if self.service else "")


_SCHEMES = {
    "redis": Topology.SINGLE,
    "rediss": Topology.SINGLE,
    "unix": Topology.SINGLE,
    "redis+sentinel": Topology.SENTINEL,
    "redis+cluster": Topology.CLUSTER,
}


def parse_redis_url(url: str) -> RedisAddress:
    """Returns the address. Raises ValueError, without the password in its text."""
    parts = urlsplit(url)
    topology = _SCHEMES.get(parts.scheme)
    if topology is None:
        raise ValueError(f"the Redis URL's scheme must be one of {', '.join(_SCHEMES)}")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    secrets = (unquote(username) or None, unquote(password) or None)
    try:
        if parts.scheme == "unix":
            db = int(parse_qs(parts.query).get("db", ["0"])[0])
            return RedisAddress(topology, (Endpoint(unix_path=_required(parts.path, "a path")),), *secrets, db=db)
        path = [one for one in parts.path.split("/") if one]
        service = path.pop(0) if topology is Topology.SENTINEL and path else ""
        if topology is Topology.SENTINEL:
            _required(service, "the name of a sentinel service after the hosts")
        default_port = SENTINEL_PORT if topology is Topology.SENTINEL else REDIS_PORT
        nodes = tuple(_endpoint(one, default_port) for one in hosts.split(","))
        if topology is Topology.SINGLE and len(nodes) > 1:
            raise ValueError("redis:// takes one host; redis+sentinel:// and redis+cluster:// take several")
        return RedisAddress(
            topology, nodes, *secrets, db=int(path[0]) if path else 0, service=service, tls=parts.scheme == "rediss"
        )
    except ValueError as error:
        raise ValueError(f"the Redis URL is wrong: {error}") from None


def _endpoint(text: str, default_port: int) -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    return Endpoint(_required(host.strip("[]"), "a host"), int(port))


def _required(text: str, what: str) -> str:
    if not text:
        raise ValueError(f"it must name {what}")
    return text
