"""Follows the health of verifier and drafter, which may come and go while the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from foveate.rpc.channel import open_channel
from foveate.rpc.errors import FoveateError, Unavailable
from gateway.clients import DrafterClient, VerifierClient
from gateway.config import GatewayConfig
from gateway.drafters import Drafters
from gateway.exchange import RETRY_AFTER_S
from gateway.facts import ServerInfo
from gateway.patience import Patience
from gateway.served import Served, TokenizerCache, look_at

logger = logging.getLogger(__name__)

OnChange = Callable[[bool], Awaitable[None]]


class Backends:
    """The verifier and the drafter of this gateway, as they are now."""

    def __init__(self, config: GatewayConfig, verifier: VerifierClient, drafter: DrafterClient | None) -> None:
        patience = Patience(config.draft_timeout_s)
        self.drafters = Drafters(drafter, patience=patience, attach_timeout_s=config.attach_timeout_s)
        self._config = config
        self._verifier = verifier
        self._drafter = drafter
        self._tokenizers = TokenizerCache()
        self._served: Served | None = None

    def served(self) -> Served:
        """Returns what is served. Raises Unavailable while there is no verifier."""
        if self._served is None:
            raise Unavailable("no verifier is ready", reason="NO_VERIFIER", retry_after_s=RETRY_AFTER_S)
        return self._served

    async def server_info(self) -> ServerInfo:
        """Returns what is served, with the pool's use as it is now."""
        served = self.served()
        info = await served.verifier.info(timeout_s=self._config.health_timeout_s)
        return ServerInfo(info, served.limits, self.drafters.is_ready)

    async def follow(self, on_verifier: OnChange) -> None:
        """Looks at both peers again and again, until cancelled; tells when the verifier comes or goes."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_verifier(on_verifier))
            if self._drafter is not None:
                group.create_task(self._follow_drafter(self._drafter))

    async def _follow_verifier(self, on_change: OnChange) -> None:
        while True:
            is_serving = await self._verifier.is_serving(self._config.health_timeout_s)
            if is_serving and self._served is None:
                with _logging_trouble("verifier"):
                    self._served = await look_at(self._verifier, self._tokenizers, self._config)
                    logger.info("verifier is ready: %s", self._served.info.model)
                    await on_change(True)
            elif not is_serving and self._served is not None:
                self._served = None
                logger.warning("verifier is lost")
                await on_change(False)
            await asyncio.sleep(self._config.health_interval_s)

    async def _follow_drafter(self, drafter: DrafterClient) -> None:
        while True:
            is_serving = await drafter.is_serving(self._config.health_timeout_s)
            if not is_serving:
                if self.drafters.is_ready:
                    logger.warning("drafter is lost; answers use n-gram drafts")
                self.drafters.is_ready = False
            elif not self.drafters.is_ready and self._served is not None:
                with _logging_trouble("drafter"):
                    await self._admit(drafter, self._served)
            await asyncio.sleep(self._config.health_interval_s)

    async def _admit(self, drafter: DrafterClient, served: Served) -> None:
        info = await drafter.info(timeout_s=self._config.health_timeout_s)
        if info.model_fingerprint != served.info.model_fingerprint:
            logger.warning("drafter is refused: it runs %s, the verifier %s", info.model, served.info.model)
            return
        self.drafters.max_draft_tokens = info.max_draft_tokens
        self.drafters.is_ready = True
        logger.info("drafter is ready: %s", info.model)


@contextlib.contextmanager
def _logging_trouble(peer: str) -> Iterator[None]:
    try:
        yield
    except FoveateError as error:
        logger.warning("%s cannot be used yet: %s", peer, error)


@contextlib.asynccontextmanager
async def connected(config: GatewayConfig) -> AsyncIterator[Backends]:
    """Opens the channels for the length of the block; connecting happens in the background."""
    async with contextlib.AsyncExitStack() as stack:
        verifier = VerifierClient(await stack.enter_async_context(open_channel(config.verifier)))
        drafter = None
        if config.drafter is not None:
            drafter = DrafterClient(await stack.enter_async_context(open_channel(config.drafter)))
        yield Backends(config, verifier, drafter)
