"""Clients of verifiers and drafters, however settings name them (gateway/targets.py), as they come and go.

A name that cannot be resolved keeps the peers it had: whether they serve is for their health to say. The channel of a
peer that has left stays open for the answers that are running on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import grpc

from foveate.rpc.channel import open_channel
from foveate.rpc.security import ClientTls
from gateway.targets import DNS, REDIS, fleet_of

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Listing = Callable[[str], Awaitable[Sequence[str]]]
ClientT = TypeVar("ClientT")

_GRACE_S = 600.0  # for answers on a peer that has left


class Peers(Generic[ClientT]):
    """Clients of the peers at `targets`, as they are now. Belongs to one event loop; close it."""

    def __init__(
        self,
        targets: Sequence[str],
        connect: Callable[[grpc.aio.Channel], ClientT],
        *,
        tls: ClientTls | None = None,
        resolve: Resolve | None = None,
        listing: Listing | None = None,
    ) -> None:
        """Opens the channels of fixed addresses. Raises OSError when a TLS file cannot be read.

        `resolve` returns the addresses of a host and port, `listing` those of a fleet.
        """
        self._names = [target for target in targets if target.startswith((DNS, REDIS))]
        self._fixed = [target for target in targets if target not in self._names]
        self._connect = connect
        self._tls = tls
        self._resolve = resolve or _resolve
        self._listing = listing
        self._open: dict[str, tuple[grpc.aio.Channel, ClientT]] = {}
        self._found: dict[str, Sequence[str]] = {}  # addresses of a name when it was last resolved
        self._leaving: set[asyncio.Task[None]] = set()
        for address in self._fixed:
            self._add(address, tls)

    @property
    def clients(self) -> tuple[ClientT, ...]:
        """Clients of all peers there are now."""
        return tuple(client for _, client in self._open.values())

    @property
    def may_grow(self) -> bool:
        """Whether there is, or may come, more than one."""
        return len(self._open) > 1 or bool(self._names)

    async def refresh(self) -> None:
        """Looks the names up; never raises."""
        if not self._names:
            return
        await asyncio.gather(*(self._look_up(name) for name in self._names))
        wanted = dict.fromkeys(self._fixed, self._tls)
        for name, addresses in self._found.items():
            wanted |= dict.fromkeys(addresses, self._tls_of(name))
        for address in [address for address in self._open if address not in wanted]:
            self._drop(address)
        for address, tls in wanted.items():
            if address not in self._open:
                self._add(address, tls)

    async def close(self) -> None:
        """Closes all channels at once."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for channel, _ in self._open.values():
            await channel.close()

    async def _look_up(self, name: str) -> None:
        if name.startswith(REDIS):
            assert self._listing is not None, "the settings were checked"
            self._found[name] = await self._listing(fleet_of(name))
            return
        host, _, port = name.removeprefix(DNS).rpartition(":")
        try:
            self._found[name] = await self._resolve(host, int(port))
        except OSError as error:
            logger.debug("%s is not resolved: %s", name, error)

    def _tls_of(self, name: str) -> ClientTls | None:
        """An address that DNS gave is no name that a certificate could carry: the one that led to it is checked."""
        if self._tls is None or self._tls.server_name or not name.startswith(DNS):
            return self._tls
        return replace(self._tls, server_name=name.removeprefix(DNS).rpartition(":")[0])

    def _add(self, address: str, tls: ClientTls | None) -> None:
        channel = open_channel(address, tls)
        self._open[address] = channel, self._connect(channel)

    def _drop(self, address: str) -> None:
        channel, _ = self._open.pop(address)
        task = asyncio.create_task(_close(channel))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


async def _close(channel: grpc.aio.Channel) -> None:
    try:
        await channel.close(_GRACE_S)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await channel.close()
        raise


async def _resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = {(family, str(where[0])) for family, _, _, _, where in found}
    return sorted(f"[{ip}]:{port}" if family is socket.AF_INET6 else f"{ip}:{port}" for family, ip in addresses)
