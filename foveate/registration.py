"""How a service says in Redis that it is there: its flags, and the entry that it keeps while it serves."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from foveate.rpc.process import FlagParser, positive
from foveate.store.address import parse_redis_url
from foveate.store.client import Store, StoreSettings
from foveate.store.keys import DEFAULT_FLEET
from foveate.store.services import ServiceKind, check_fleet, registered_while
from foveate.v1 import records_pb2

AUTO = "auto"
# No answer waits for the list of services: a slow Redis is given more time than on the way of an answer.
_PATIENCE_S = 0.5


@dataclass(frozen=True)
class RegistrationConfig:
    """Where to register, and as what. `address` is "auto", HOST or HOST:PORT."""

    redis: StoreSettings
    address: str
    fleet: str = DEFAULT_FLEET


def add_redis_flags(parser: FlagParser, what: str) -> None:
    """Adds the flags of `redis_settings`; `what` says which Redis it is."""
    parser.flag("redis", str, "", what)
    parser.flag("redis-timeout-ms", positive, 50, "longest wait for a small command to Redis")
    parser.flag("redis-breaker-s", positive, 5, "seconds without Redis after it did not answer")


def redis_settings(options: argparse.Namespace) -> StoreSettings | None:
    """Returns where Redis is; None without one. Raises ValueError when the URL is wrong."""
    if not options.redis:
        return None
    try:
        address = parse_redis_url(options.redis)
    except ValueError as error:
        raise ValueError(f"--redis: {error}") from None
    return StoreSettings(address, timeout_s=options.redis_timeout_ms / 1e3, breaker_s=options.redis_breaker_s)


def add_registration_flags(parser: FlagParser) -> None:
    """Adds the flags of `registration_config`."""
    parser.flag(
        "register",
        str,
        "",
        "HOST or HOST:PORT at which gateways reach this service, or auto: it is then listed in --redis, under a lease",
    )
    parser.flag("fleet", str, DEFAULT_FLEET, "name under which it is listed: gateways ask for redis:NAME")


def registration_config(options: argparse.Namespace) -> RegistrationConfig | None:
    """Returns how to register; None when that is not asked for. Raises ValueError when the flags do not fit."""
    if not options.register:
        return None
    redis = redis_settings(options)
    if redis is None:
        raise ValueError("--register needs --redis")
    try:
        return RegistrationConfig(redis, options.register, check_fleet(options.fleet))
    except ValueError as error:
        raise ValueError(f"--fleet: {error}") from None


def list_store(redis: StoreSettings) -> Store:
    """Returns the store of whoever reads or writes the list of services: apart from the one that answers wait for."""
    return Store(replace(redis, timeout_s=max(redis.timeout_s, _PATIENCE_S)))


def registered(
    config: RegistrationConfig | None, kind: ServiceKind, port: int, record: records_pb2.ServiceRecord
) -> AbstractAsyncContextManager[None]:
    """Returns what keeps a service that listens at `port` registered while it is entered; `record` says what it runs.

    It unregisters at once when the block is left: that is the beginning of a drain.
    """
    return contextlib.nullcontext() if config is None else _registered(config, kind, port, record)


@contextlib.asynccontextmanager
async def _registered(
    config: RegistrationConfig, kind: ServiceKind, port: int, record: records_pb2.ServiceRecord
) -> AsyncIterator[None]:
    record.address = _reachable(config, port)
    record.instance_id = secrets.token_hex(8)
    store = list_store(config.redis)
    try:
        async with registered_while(store, kind, config.fleet, record):
            yield
    finally:
        await store.close()


def _reachable(config: RegistrationConfig, port: int) -> str:
    """Returns the address to register. "auto" is the one from which Redis is reached. Raises OSError."""
    if config.address != AUTO:
        has_port = ":" in config.address.rpartition("]")[2]
        return config.address if has_port else f"{config.address}:{port}"
    node = config.redis.address.nodes[0]
    if node.unix_path:
        return f"127.0.0.1:{port}"
    family, kind, protocol, _, where = socket.getaddrinfo(node.host, node.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)  # sends nothing: it only chooses the way
        host = str(probe.getsockname()[0])
    return f"[{host}]:{port}" if family is socket.AF_INET6 else f"{host}:{port}"
