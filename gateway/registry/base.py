"""What a registry offers. Holders are hints: the verifier is the only authority on what its pool holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.values import Turn


@dataclass(frozen=True)
class ConversationTurn:
    """A question, its answer, and the ids of the answer's tokens."""

    question: Turn
    answer: Turn
    answer_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """A conversation as it was read; `version` is 0 for one that is not kept yet."""

    conversation_id: str
    tenant: str
    context: str
    turns: tuple[ConversationTurn, ...] = ()
    version: int = 0

    @property
    def history(self) -> tuple[Turn, ...]:
        """All turns as a prompt has them, oldest first."""
        return tuple(
            part
            for turn in self.turns
            for part in (turn.question, replace(turn.answer, token_ids=turn.answer_token_ids))
        )


class ConversationChanged(Exception):
    """Somebody else wrote the conversation since it was read."""


class Registry(Protocol):
    """Holders of contexts, and conversations."""

    @property
    def kind(self) -> str:
        """ "memory" or "redis"."""

    async def holders(self, context: str) -> frozenset[str]:
        """Returns the pools that were said to hold a context. Never raises; empty when nothing is known."""

    def note_holder(self, context: str, pool_id: str) -> None:
        """Remembers that a pool holds a context."""

    def drop_holder(self, context: str, pool_id: str) -> None:
        """Remembers that a pool does not."""

    def note_fetch_ms(self, context: str, fetch_ms: float | None) -> None:
        """Remembers what a verifier without the context would need to get it; None: it could not."""

    def fetch_ms(self, context: str) -> float | None:
        """Returns what was remembered last."""

    async def conversation(self, conversation_id: str, tenant: str) -> Conversation | None:
        """Returns a conversation; None when there is none. Raises Unavailable while nobody can tell."""

    async def keep(self, conversation: Conversation) -> None:
        """Writes a conversation over the version it was read at.

        Raises ConversationChanged when it is not at that version any more, Unavailable when it cannot be written.
        """

    @property
    def is_away(self) -> bool:
        """Whether what the registry is kept in does not answer, and is left alone for now."""

    def counters(self) -> Mapping[str, int]:
        """Returns what happened since the start, by name."""

    async def close(self) -> None:
        """Closes connections."""
