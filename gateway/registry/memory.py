"""The registry of one gateway process; what it forgets can be found out again."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gateway.registry.base import Conversation, ConversationChanged

_MAX_CONTEXTS = 20_000
_MAX_CONVERSATIONS = 5_000


@dataclass
class _Known:
    holders: set[str] = field(default_factory=set)
    fetch_ms: float | None = None


class MemoryRegistry:
    """Bounded, least recently used first."""

    kind = "memory"
    is_away = False

    def __init__(self, *, conversation_ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = conversation_ttl_s
        self._clock = clock
        self._contexts: OrderedDict[str, _Known] = OrderedDict()
        self._conversations: OrderedDict[tuple[str, str], tuple[Conversation, float]] = OrderedDict()

    async def holders(self, context: str) -> frozenset[str]:
        """Returns the pools that were said to hold a context."""
        return self.known_holders(context)

    def known_holders(self, context: str) -> frozenset[str]:
        """As `holders`, at once."""
        known = self._contexts.get(context)
        return frozenset() if known is None else frozenset(known.holders)

    def note_holder(self, context: str, pool_id: str) -> None:
        """Remembers that a pool holds a context."""
        self._known(context).holders.add(pool_id)

    def drop_holder(self, context: str, pool_id: str) -> None:
        """Remembers that a pool does not."""
        self._known(context).holders.discard(pool_id)

    def note_fetch_ms(self, context: str, fetch_ms: float | None) -> None:
        """Remembers what a verifier without the context would need to get it."""
        self._known(context).fetch_ms = fetch_ms

    def fetch_ms(self, context: str) -> float | None:
        """Returns what was remembered last."""
        known = self._contexts.get(context)
        return None if known is None else known.fetch_ms

    async def conversation(self, conversation_id: str, tenant: str) -> Conversation | None:
        """Returns a conversation that was not left alone for longer than its time."""
        kept = self._conversations.get((tenant, conversation_id))
        if kept is None:
            return None
        conversation, used_s = kept
        if self._clock() - used_s > self._ttl_s:
            del self._conversations[tenant, conversation_id]
            return None
        return conversation

    async def keep(self, conversation: Conversation) -> None:
        """Writes a conversation. Raises ConversationChanged."""
        key = (conversation.tenant, conversation.conversation_id)
        now = await self.conversation(conversation.conversation_id, conversation.tenant)
        if (0 if now is None else now.version) != conversation.version:
            raise ConversationChanged
        self._conversations[key] = (replace(conversation, version=conversation.version + 1), self._clock())
        self._conversations.move_to_end(key)
        while len(self._conversations) > _MAX_CONVERSATIONS:
            self._conversations.popitem(last=False)

    def counters(self) -> Mapping[str, int]:
        """Returns nothing: memory does not fail."""
        return {}

    async def close(self) -> None:
        """Closes nothing."""

    def _known(self, context: str) -> _Known:
        known = self._contexts.setdefault(context, _Known())
        self._contexts.move_to_end(context)
        while len(self._contexts) > _MAX_CONTEXTS:
            self._contexts.popitem(last=False)
        return known
