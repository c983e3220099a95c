"""The registry in Redis, for any number of gateways. While Redis does not answer, what this process knows has to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from foveate.rpc.errors import Unavailable
from foveate.store import keys, scripts
from foveate.store.client import Store
from foveate.store.errors import Corrupt, StoreError
from gateway.codec.conversations import read_conversation, write_conversation
from gateway.registry.base import Conversation, ConversationChanged
from gateway.registry.memory import MemoryRegistry


class RedisRegistry:
    """Holders as the verifiers write them, conversations as gateways write them."""

    kind = "redis"

    def __init__(self, store: Store, *, conversation_ttl_s: float) -> None:
        self._store = store
        self._ttl_ms = int(conversation_ttl_s * 1e3)
        self._memory = MemoryRegistry(conversation_ttl_s=conversation_ttl_s)
        self._counters: Counter[str] = Counter()

    async def holders(self, context: str) -> frozenset[str]:
        """Returns the pools that verifiers have registered, or what this process knows without Redis."""
        context_id = context.removeprefix("contexts/")
        try:
            found = await self._store.run(lambda client: client.hkeys(keys.holders(context_id)))
        except StoreError:
            return self._memory.known_holders(context)
        return frozenset(raw.decode(errors="replace") for raw in found) | self._memory.known_holders(context)

    def note_holder(self, context: str, pool_id: str) -> None:
        """Remembers it here; the verifier itself tells everybody."""
        self._memory.note_holder(context, pool_id)

    def drop_holder(self, context: str, pool_id: str) -> None:
        """Forgets it here; the verifier itself tells everybody."""
        self._memory.drop_holder(context, pool_id)

    def note_fetch_ms(self, context: str, fetch_ms: float | None) -> None:
        """Remembers it here."""
        self._memory.note_fetch_ms(context, fetch_ms)

    def fetch_ms(self, context: str) -> float | None:
        """Returns what was remembered here."""
        return self._memory.fetch_ms(context)

    async def conversation(self, conversation_id: str, tenant: str) -> Conversation | None:
        """Returns a conversation. Raises Unavailable while Redis does not answer: a stale one would be wrong."""
        read = await self._read(conversation_id, tenant)
        return None if read is None else read[0]

    async def keep(self, conversation: Conversation) -> None:
        """Writes a conversation over the very bytes of the version it was read at."""
        read = await self._read(conversation.conversation_id, conversation.tenant)
        now, expected = (0, b"") if read is None else (read[0].version, read[1])
        if now != conversation.version:
            raise ConversationChanged
        key = keys.conversation(conversation.tenant, conversation.conversation_id)
        data = write_conversation(replace(conversation, version=conversation.version + 1))
        try:
            if not await self._store.script(scripts.COMPARE_AND_SET, [key], [expected, data, self._ttl_ms]):
                raise ConversationChanged
        except StoreError as error:
            raise _unreachable() from error

    @property
    def is_away(self) -> bool:
        """Whether the breaker is open."""
        return self._store.breaker.is_open

    def counters(self) -> Mapping[str, int]:
        """Returns what happened since the start."""
        return {**self._counters, **self._store.counters, "breaker_opened": self._store.breaker.num_opened}

    async def close(self) -> None:
        """Closes the connections."""
        await self._store.close()

    async def _read(self, conversation_id: str, tenant: str) -> tuple[Conversation, bytes] | None:
        key = keys.conversation(tenant, conversation_id)
        try:
            data = await self._store.run(lambda client: client.get(key))
            if data is None:
                return None
            read = read_conversation(data)
            if (read.conversation_id, read.tenant) != (conversation_id, tenant):
                raise Corrupt("a conversation's record belongs to another one")
        except Corrupt:
            # What was said cannot be known any more; starting over in its place is better than going on wrongly.
            self._counters["conversation_corrupt"] += 1
            await self._forget(key)
            return None
        except StoreError as error:
            raise _unreachable() from error
        return read, data

    async def _forget(self, key: str) -> None:
        try:
            await self._store.run(lambda client: client.delete(key))
        except StoreError as error:
            raise _unreachable() from error


def _unreachable() -> Unavailable:
    return Unavailable("conversations cannot be reached: Redis does not answer", reason="REDIS_LOST", retry_after_s=1.0)
