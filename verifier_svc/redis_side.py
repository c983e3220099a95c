"""Everything of a verifier that speaks to Redis, started and closed together."""

from __future__ import annotations

from collections import Counter

from engine.device_thread import DeviceThread
from foveate.store.client import Store
from verifier_svc.cold.tier import ColdTier
from verifier_svc.config import ColdConfig
from verifier_svc.contexts import ContextStore
from verifier_svc.directory import Directory
from verifier_svc.engine_parts import EngineParts
from verifier_svc.publishing import Publisher


class RedisSide:
    """Store, cold tier, directory and publisher of one verifier."""

    def __init__(self, parts: EngineParts, config: ColdConfig, device: DeviceThread) -> None:
        self._parts = parts
        self._config = config
        self._device = device
        self.store = Store(config.redis)
        self.cold = ColdTier(self.store, config)
        self.directory = Directory(self.store, pool_id=parts.pool.handle.pool_id, ttl_s=config.ttl_s)
        self.publisher: Publisher

    def start(self, contexts: ContextStore) -> None:
        """Begins to speak; nothing waits for Redis here."""
        self.publisher = Publisher(
            self._parts.pool,
            device=self._device,
            contexts=contexts,
            cold=self.cold,
            directory=self.directory,
            max_media_bytes=self._config.max_media_bytes,
            int8=self._config.int8,
        )
        self.directory.start()

    async def close(self) -> None:
        """Hands over what is not written yet and closes every connection."""
        await self.publisher.close(self._config.hand_over_s)
        await self.directory.close()
        await self.cold.close()
        await self.store.close()

    def counters(self) -> Counter[str]:
        """Returns what happened since the start."""
        counters = self.cold.counters + self.directory.counters + self.store.counters
        counters["breaker_opened"] = self.store.breaker.num_opened
        return counters
