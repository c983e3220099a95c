"""Follows the health of verifiers and drafters, which may come and go while the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from foveate.registration import list_store
from foveate.rpc.errors import FoveateError
from foveate.store.client import Store
from foveate.store.services import ServiceKind
from gateway.clients import DrafterClient, VerifierClient
from gateway.config import GatewayConfig
from gateway.drafters import DefaultBudgets, DrafterPeer, Drafters
from gateway.facts import ServerInfo
from gateway.failover import FailoverOpener
from gateway.handshake import Refusals, fitting_kinds, misfit
from gateway.listing import RegisteredPeers
from gateway.peers import Listing, Peers, Resolve
from gateway.registry import MemoryRegistry, RedisRegistry, Registry
from gateway.served import Served
from gateway.verifiers import Verifiers

logger = logging.getLogger(__name__)

OnChange = Callable[[bool], Awaitable[None]]


class Backends:
    """The verifiers and the drafters of this gateway, as they are now."""

    def __init__(
        self,
        config: GatewayConfig,
        verifiers: Peers[VerifierClient],
        drafters: Peers[DrafterClient],
        registry: Registry,
    ) -> None:
        self.drafters = Drafters(
            is_configured=bool(config.drafters),
            floor_s=config.draft_timeout_s,
            attach_timeout_s=config.attach_timeout_s,
            budgets=DefaultBudgets(config.default_visual_budget, config.default_small_budget),
        )
        self.registry = registry
        self.verifiers = Verifiers(config, verifiers, registry)
        self._opener = FailoverOpener(self.verifiers, wait_s=config.failover_wait_s, open_wait_s=config.verifier_wait_s)
        self._config = config
        self._drafter_peers = drafters
        self._refusals = Refusals()

    def served(self) -> Served:
        """Returns what is served. Raises Unavailable while there is no verifier."""
        return self.verifiers.served()

    def for_answers(self) -> Served:
        """Returns what is served, for answers: each goes to the best verifier for it, and outlives that one."""
        return replace(self.served(), opener=self._opener)

    @property
    def is_ready(self) -> bool:
        """Whether there is a verifier."""
        return self.verifiers.num_ready > 0

    @property
    def kv_transport(self) -> str:
        """How the drafter reads the verifier's KV; "none" without both."""
        return self.served().info.kv_transport if self.is_ready and self.drafters.is_ready else "none"

    async def server_info(self) -> ServerInfo:
        """Returns what is served, with the pools' use as it is now."""
        await self.verifiers.refresh()
        served = self.verifiers.all_served()
        first = served[0]
        info = replace(
            first.info,
            pool_bytes=sum(one.info.pool_bytes for one in served),
            pool_used_bytes=sum(one.info.pool_used_bytes for one in served),
            has_cold_tier=any(one.info.has_cold_tier for one in served),
        )
        counters = {**self.verifiers.counters()}
        for name, count in self.registry.counters().items():
            counters[f"gateway_{name}"] = count
        return ServerInfo(
            info,
            first.limits,
            self.drafters.is_ready,
            self.drafters.modes,
            registry=self.registry.kind,
            num_verifiers=len(served),
            context_counters=counters,
        )

    async def follow(self, on_verifier: OnChange) -> None:
        """Looks at all peers again and again, until cancelled; tells when the first verifier comes or the last goes."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_verifiers(on_verifier))
            group.create_task(self._follow_drafters(group))

    async def _follow_verifiers(self, on_change: OnChange) -> None:
        was_ready = False
        while True:
            await self.verifiers.look()
            is_ready = self.verifiers.num_ready > 0
            if is_ready != was_ready:
                was_ready = is_ready
                await on_change(is_ready)
            await asyncio.sleep(self._config.health_interval_s)

    async def _follow_drafters(self, group: asyncio.TaskGroup) -> None:
        """Follows those that are there, however they come and go."""
        followed: dict[DrafterClient, asyncio.Task[None]] = {}
        while True:
            await self._drafter_peers.refresh()
            clients = self._drafter_peers.clients
            for gone in followed.keys() - set(clients):
                followed.pop(gone).cancel()
                self.drafters.leave(gone)
            for client in clients:
                if client not in followed:
                    followed[client] = group.create_task(self._follow_drafter(self.drafters.join(client)))
            await asyncio.sleep(self._config.health_interval_s)

    async def _follow_drafter(self, drafter: DrafterPeer) -> None:
        while True:
            is_serving = await drafter.client.is_serving(self._config.health_timeout_s)
            if not is_serving:
                if drafter.is_ready:
                    logger.warning("a drafter is lost; its answers go on with n-gram drafts")
                self._refusals.forget(drafter)
                drafter.refuse("")
            elif not drafter.is_ready and self.verifiers.num_ready:
                await self._admit(drafter, self.served())
            await asyncio.sleep(self._config.health_interval_s)

    async def _admit(self, drafter: DrafterPeer, served: Served) -> None:
        try:
            info = await drafter.client.info(timeout_s=self._config.health_timeout_s)
            kinds = fitting_kinds(info, served.info)
        except FoveateError as error:
            drafter.refuse(str(error))
            self._refusals.say(drafter, f"drafter cannot be used yet: {error}")
            return
        for kind in info.kinds:
            if kind.mode not in kinds:
                logger.warning("%s drafts are refused: %s", kind.mode.name.lower(), misfit(kind, served.info))
        self._refusals.forget(drafter)
        drafter.admit(info, kinds)
        logger.info("drafter is ready: %s", ", ".join(sorted(kind.name.lower() for kind in kinds)))


@contextlib.asynccontextmanager
async def connected(config: GatewayConfig, resolve: Resolve | None = None) -> AsyncIterator[Backends]:
    """Opens the channels for the length of the block; connecting happens in the background.

    `resolve` looks names up in place of the system.
    """
    async with contextlib.AsyncExitStack() as stack:
        listing = dict[ServiceKind, Listing]()
        if config.redis is not None:
            services = list_store(config.redis)
            stack.push_async_callback(services.close)
            listing = {kind: RegisteredPeers(services, kind) for kind in ServiceKind}
        verifiers = Peers(
            config.verifiers,
            VerifierClient,
            tls=config.peer_tls,
            resolve=resolve,
            listing=listing.get(ServiceKind.VERIFIER),
        )
        stack.push_async_callback(verifiers.close)
        drafters = Peers(
            config.drafters,
            DrafterClient,
            tls=config.peer_tls,
            resolve=resolve,
            listing=listing.get(ServiceKind.DRAFTER),
        )
        stack.push_async_callback(drafters.close)
        registry = open_registry(config)
        stack.push_async_callback(registry.close)
        yield Backends(config, verifiers, drafters, registry)


def open_registry(config: GatewayConfig) -> Registry:
    """Returns the registry in Redis, when one is configured, else one in memory; connecting happens on use."""
    if config.redis is None:
        return MemoryRegistry(conversation_ttl_s=config.conversation_ttl_s)
    return RedisRegistry(Store(config.redis), conversation_ttl_s=config.conversation_ttl_s)
