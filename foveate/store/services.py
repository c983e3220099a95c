"""The list of living services in Redis: each keeps its own entry under a lease, gateways read all of them.

    register     an entry and its lease, renewed three times as often as it ends; after an empty restart it is back soon
    unregister   the entry stays as an empty one for a lease: readers learn that the service leaves, not that it is lost
    registered   entries whose lease has not ended

Ends of leases are the server's clock, never ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum

from foveate.store import keys, scripts
from foveate.store.client import Store
from foveate.store.errors import Corrupt, StoreError
from foveate.store.frame import Kind, pack, unpack
from foveate.v1 import records_pb2

logger = logging.getLogger(__name__)

LEASE_S = 6.0
RENEW_S = 2.0
_FLEET = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ServiceKind(Enum):
    """What is registered; the value is in the keys."""

    VERIFIER = "verifier"
    DRAFTER = "drafter"


@dataclass(frozen=True)
class Listed:
    """What the list says now: records of the services that live, addresses of those that are leaving."""

    living: tuple[records_pb2.ServiceRecord, ...]
    leaving: frozenset[str]


def check_fleet(fleet: str) -> str:
    """Returns a fleet's name. Raises ValueError when it can be none."""
    if _FLEET.fullmatch(fleet) is None:
        raise ValueError(f"{fleet!r} is no name of a fleet: 1 to 64 letters, digits, - _ .")
    return fleet


@contextlib.asynccontextmanager
async def registered_while(
    store: Store, kind: ServiceKind, fleet: str, record: records_pb2.ServiceRecord
) -> AsyncIterator[None]:
    """Keeps a service registered for the length of the block; without Redis it tries again and again."""
    names, data = _names(kind, fleet), pack(Kind.SERVICE, record)
    told: list[str | bytes | int] = [record.address, data, int(LEASE_S * 1e3)]
    renewing = asyncio.create_task(_renew(store, names, told))
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await store.script(scripts.UNREGISTER, names, told)


async def registered(store: Store, kind: ServiceKind, fleet: str) -> Listed:
    """Returns what is registered. A damaged entry counts as none. Raises StoreError."""
    reply = await store.script(scripts.REGISTERED, _names(kind, fleet), [])
    living, leaving = list[records_pb2.ServiceRecord](), set[str]()
    for raw, data in zip(reply[::2], reply[1::2], strict=True):
        address = raw.decode(errors="replace")
        if not data:
            leaving.add(address)
            continue
        try:
            record = unpack(Kind.SERVICE, data, records_pb2.ServiceRecord)
        except Corrupt as error:
            logger.error("the entry of the %s at %s is refused: %s", kind.value, address, error)
            continue
        if record.address == address:
            living.append(record)
    return Listed(tuple(living), frozenset(leaving))


async def _renew(store: Store, names: list[str], told: list[str | bytes | int]) -> None:
    while True:
        with contextlib.suppress(StoreError):
            await store.script(scripts.REGISTER, names, told)
        await asyncio.sleep(RENEW_S)


def _names(kind: ServiceKind, fleet: str) -> list[str]:
    return [keys.leases(kind.value, fleet), keys.services(kind.value, fleet)]
