"""Conversations that the server keeps: the turns before a question come from the registry, and its answer goes there.

A conversation is written when an answer has ended well, over the version that was read when it began; of two answers at
the same time one is kept, and the other says so. An answer that is cancelled leaves the conversation as it was.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from foveate.rpc.errors import FoveateError, NotFound, invalid
from gateway.registry import Conversation, ConversationChanged, Registry
from gateway.registry.base import ConversationTurn
from gateway.validation import AskFields, TurnFields
from gateway.values import Delta, Event, Finished, Role, Turn

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True)
class Begun:
    """A question with the turns before it, and where it is kept; `conversation` is None when it is not."""

    fields: AskFields
    conversation: Conversation | None
    registry: Registry

    async def kept(self, events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        """Yields an answer's events, and keeps the turn before the last of them."""
        text: list[str] = []
        token_ids: list[int] = []
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    text.append(event.text)
                    token_ids.extend(token.id for token in event.tokens)
                if isinstance(event, Finished):
                    event = await self._keep(event, "".join(text), tuple(token_ids))
                yield event

    async def _keep(self, finished: Finished, text: str, token_ids: tuple[int, ...]) -> Finished:
        if self.conversation is None:
            return finished
        turn = ConversationTurn(Turn(Role.USER, self.fields.question), Turn(Role.ASSISTANT, text), token_ids)
        turns = (*self.conversation.turns, turn)
        try:
            await self.registry.keep(replace(self.conversation, context=self.fields.context, turns=turns))
        except ConversationChanged:
            return _with_note(finished, "another answer changed the conversation meanwhile; this turn is not kept")
        except FoveateError as error:
            return _with_note(finished, f"this turn is not kept: {error.message}")
        return replace(finished, num_conversation_turns=len(turns))


async def begin(fields: AskFields, tenant: str, registry: Registry) -> Begun:
    """Returns a question with its conversation's turns as history.

    Raises InvalidArgument for fields that do not fit the conversation, NotFound for a branch of nothing, Unavailable.
    """
    if not fields.conversation:
        if fields.keep_turns is not None or fields.branch_of:
            raise invalid("conversation", "must be set with keep_turns or branch_of")
        return Begun(fields, None, registry)
    _check(fields)
    conversation = await _read(fields, tenant, registry)
    if fields.keep_turns is not None:
        if fields.keep_turns > len(conversation.turns):
            raise invalid("keep_turns", f"must be at most {len(conversation.turns)}, the turns of the conversation")
        conversation = replace(conversation, turns=conversation.turns[: fields.keep_turns])
    if fields.context not in ("", conversation.context) and conversation.context:
        raise invalid("context", f"must be {conversation.context}, which the conversation is about")
    history = tuple(TurnFields(int(turn.role), turn.text, turn.token_ids) for turn in conversation.history)
    asked = replace(fields, context=fields.context or conversation.context, history=history)
    return Begun(asked, conversation, registry)


def _check(fields: AskFields) -> None:
    for name, value in (("conversation", fields.conversation), ("branch_of", fields.branch_of)):
        if value and _ID.fullmatch(value) is None:
            raise invalid(name, 'must be 1 to 128 of A-Z, a-z, 0-9, "-", "_"')
    if fields.history:
        raise invalid("history", "must be empty with a conversation, which has its own")


async def _read(fields: AskFields, tenant: str, registry: Registry) -> Conversation:
    found = await registry.conversation(fields.conversation, tenant)
    if not fields.branch_of:
        return found or Conversation(fields.conversation, tenant, "")
    if found is not None:
        raise invalid("conversation", "must not exist yet with branch_of")
    origin = await registry.conversation(fields.branch_of, tenant)
    if origin is None:
        raise NotFound(f"no conversation {fields.branch_of}", resource=("conversation", fields.branch_of))
    return Conversation(fields.conversation, tenant, origin.context, origin.turns)


def _with_note(finished: Finished, note: str) -> Finished:
    return replace(finished, notes=(*finished.notes, note))
