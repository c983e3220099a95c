"""Contexts as the gateway offers them.

The verifier is the only authority on what is held, so every call asks it; a registry of owners fits here.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from foveate.rpc.errors import NotFound, invalid
from gateway.clients import VerifierClient
from gateway.exchange import Deadline
from gateway.facts import Context, ContextProgress, ContextSpec, Limits, MediaChunk
from gateway.validation import UploadCheck


@dataclass(frozen=True)
class Page:
    """A page of contexts, newest first; the token is empty on the last."""

    contexts: tuple[Context, ...]
    next_page_token: str


class ContextCache:
    """Creates, finds, lists and deletes contexts of one verifier."""

    def __init__(self, verifier: VerifierClient, limits: Limits) -> None:
        self._verifier = verifier
        self._limits = limits

    async def create(
        self, parts: AsyncIterator[ContextSpec | MediaChunk | None], deadline: Deadline
    ) -> AsyncGenerator[ContextProgress | Context]:
        """Hands a video on, part by part, and yields the verifier's progress and then the context.

        A part is read from the caller only when the verifier has taken the one before.
        """
        events = self._verifier.prefill(self._checked(parts), deadline)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def get(self, name: str, deadline: Deadline) -> Context:
        """Returns a context. Raises NotFound."""
        for held in await self._verifier.contexts(deadline):
            if held.name == name:
                return held
        raise NotFound(f"{name} is not held; create it again", resource=("context", name))

    async def list(self, page_size: int, page_token: str, deadline: Deadline) -> Page:
        """Returns the page after `page_token`. Raises InvalidArgument for a token that no page had."""
        after = _key_of_token(page_token)
        held = sorted(await self._verifier.contexts(deadline), key=_key)
        rest = [context for context in held if after is None or _key(context) > after]
        page = tuple(rest[:page_size])
        return Page(page, _token_of(page[-1]) if len(rest) > page_size else "")

    async def delete(self, name: str, deadline: Deadline) -> None:
        """Frees a context. Raises NotFound."""
        await self._verifier.release_context(name, deadline)

    async def _checked(
        self, parts: AsyncIterator[ContextSpec | MediaChunk | None]
    ) -> AsyncIterator[ContextSpec | MediaChunk]:
        check = UploadCheck(self._limits)
        async for part in parts:
            yield check.check(part)
        check.check_end()


def _key(context: Context) -> tuple[int, str]:
    """Newest first, then by name. A page token is the key of the last context seen, so it survives deletions."""
    return -context.create_time_ns, context.name


def _token_of(context: Context) -> str:
    return base64.urlsafe_b64encode(f"{context.create_time_ns} {context.name}".encode()).decode()


def _key_of_token(page_token: str) -> tuple[int, str] | None:
    if not page_token:
        return None
    try:
        create_time_ns, name = base64.b64decode(page_token, altchars=b"-_", validate=True).decode().split(" ", 1)
        return -int(create_time_ns), name
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise invalid("page_token", "must be the next_page_token of an earlier page") from None
