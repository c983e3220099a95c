"""Contexts as the gateway offers them.

The verifiers are the only authority on what is held, here and in the cold tier, so every call asks them. What several
of them hold is one context.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from foveate.context_source import ContextSource
from foveate.rpc.errors import FoveateError, NotFound, invalid
from gateway.clients import VerifierClient
from gateway.exchange import Deadline, lost
from gateway.facts import (
    Context,
    ContextFilter,
    ContextProgress,
    ContextSpec,
    ContextState,
    HeldContext,
    Limits,
    MediaChunk,
)
from gateway.served import Served
from gateway.validation import UploadCheck
from gateway.verifiers import Verifiers

Answered = TypeVar("Answered")


@dataclass(frozen=True)
class Page:
    """A page of contexts, newest first; the token is empty on the last."""

    contexts: tuple[Context, ...]
    next_page_token: str


Ask = Callable[[VerifierClient], Awaitable[Answered]]
_VERIFIER_S = 5.0  # a verifier that takes longer to tell what it holds is left out


@dataclass(frozen=True)
class _Replies(Generic[Answered]):
    """What verifiers answered, and the failure of one that may have known more."""

    answers: Sequence[Answered]
    failure: BaseException | None


class ContextCache:
    """Creates, finds, lists, keeps and deletes one tenant's contexts, over all verifiers."""

    def __init__(self, verifiers: Verifiers, limits: Limits, tenant: str) -> None:
        self._verifiers = verifiers
        self._limits = limits
        self._tenant = tenant

    async def create(
        self, parts: AsyncIterator[ContextSpec | MediaChunk | None], deadline: Deadline
    ) -> AsyncGenerator[ContextProgress | HeldContext]:
        """Hands a video on, part by part, and yields the verifier's progress and then the context.

        A part is read from the caller only when the verifier has taken the one before. The spec chooses the verifier.
        """
        checked = self._checked(parts)
        first = await anext(checked, None)
        if first is None:
            raise invalid("spec", "must be sent first")
        served = self._verifier_for(first)
        events = served.verifier.prefill(
            _chained(first, checked), deadline, tenant=self._tenant, usable_pool_ids=self._verifiers.pool_ids
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, HeldContext):
                    self._verifiers.registry.note_holder(event.context.name, event.pool_id)
                yield event

    def _verifier_for(self, first: ContextSpec | MediaChunk) -> Served:
        """Returns who makes a context: always the same verifier for a request that may come again, and for a path."""
        if not isinstance(first, ContextSpec):
            raise invalid("spec", "must be sent first")
        if first.request_id:
            return self._verifiers.for_request(f"{len(self._tenant)}:{self._tenant}{first.request_id}")
        return self._verifiers.for_creation(first.path or first.url or secrets.token_hex(8))

    async def watch(
        self, deadline: Deadline, *, request_id: str, name: str
    ) -> AsyncGenerator[ContextProgress | Context]:
        """Yields the progress of a creation or of a context, and then the context. Raises NotFound."""
        failure: FoveateError | None = None
        for served in self._verifiers.all_served():
            events = served.verifier.watch(deadline, tenant=self._tenant, request_id=request_id, name=name)
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        yield event
                return
            except NotFound as error:
                failure = failure or error
        assert failure is not None, "somebody was asked"
        raise failure

    async def get(self, name: str, deadline: Deadline) -> Context:
        """Returns a context. Raises NotFound, or Unavailable when nobody can tell."""
        replies = await self._ask_all(lambda verifier: verifier.contexts(deadline, tenant=self._tenant, name=name))
        for context in _merged(replies.answers):
            return context
        raise replies.failure or NotFound(f"{name} is not held; create it again", resource=("context", name))

    async def list(self, page_size: int, page_token: str, wanted: ContextFilter, deadline: Deadline) -> Page:
        """Returns the page after `page_token`. Raises InvalidArgument for a token that no page had."""
        after = _key_of_token(page_token)
        replies = await self._ask_all(lambda verifier: verifier.contexts(deadline, tenant=self._tenant))
        held = sorted(filter(wanted.admits, _merged(replies.answers)), key=_key)
        rest = [context for context in held if after is None or _key(context) > after]
        page = tuple(rest[:page_size])
        return Page(page, _token_of(page[-1]) if len(rest) > page_size else "")

    async def delete(self, name: str, deadline: Deadline) -> None:
        """Frees a context everywhere. Raises NotFound when it was nowhere."""
        await self._ask_all(lambda verifier: verifier.release_context(name, deadline, tenant=self._tenant))

    async def touch(self, name: str, deadline: Deadline, *, pinned: bool | None) -> Context:
        """Puts a context's expiry off everywhere, and pins or unpins it. Raises NotFound when it is nowhere."""
        replies = await self._ask_all(
            lambda verifier: verifier.touch_context(name, deadline, tenant=self._tenant, pinned=pinned)
        )
        return _merged([replies.answers])[0]

    async def _ask_all(self, ask: Ask[Answered]) -> _Replies[Answered]:
        """Returns what verifiers answer, all asked at once. Raises when none could answer."""
        served = self._verifiers.all_served()
        replies = await asyncio.gather(*(_in_time(ask(one.verifier)) for one in served), return_exceptions=True)
        answers = [reply for reply in replies if not isinstance(reply, BaseException)]
        failures = [reply for reply in replies if isinstance(reply, BaseException)]
        failure = next((one for one in failures if not isinstance(one, NotFound)), None)
        if failures and not answers:
            raise failure or failures[0]
        return _Replies(answers, failure)

    async def _checked(
        self, parts: AsyncIterator[ContextSpec | MediaChunk | None]
    ) -> AsyncIterator[ContextSpec | MediaChunk]:
        check = UploadCheck(self._limits)
        async for part in parts:
            yield check.check(part)
        check.check_end()


async def _in_time(asking: Awaitable[Answered]) -> Answered:
    try:
        async with asyncio.timeout(_VERIFIER_S):
            return await asking
    except TimeoutError:
        raise lost("verifier", "a verifier does not answer") from None


async def _chained(
    first: ContextSpec | MediaChunk, rest: AsyncIterator[ContextSpec | MediaChunk]
) -> AsyncIterator[ContextSpec | MediaChunk]:
    yield first
    async for part in rest:
        yield part


def _merged(found: Iterable[Sequence[Context]]) -> list[Context]:
    """Returns every context once, as all that hold it together see it."""
    merged: dict[str, Context] = {}
    for context in (context for of_verifier in found for context in of_verifier):
        before = merged.get(context.name)
        merged[context.name] = context if before is None else _together(before, context)
    return list(merged.values())


def _together(one: Context, other: Context) -> Context:
    ready = [context for context in (one, other) if context.state is ContextState.READY]
    shown = ready[0] if ready else one
    tiers = {**one.tiers, **other.tiers}
    in_pools = sum(context.tiers.get(ContextSource.POOL, 0) for context in (one, other))
    if in_pools:
        tiers[ContextSource.POOL] = in_pools
    expiries = [context.expire_time_ns for context in (one, other) if context.expire_time_ns is not None]
    return replace(
        shown,
        kv_bytes=in_pools or shown.kv_bytes,
        tiers=tiers,
        num_hits=one.num_hits + other.num_hits,
        pinned=one.pinned or other.pinned,
        lossy=one.lossy or other.lossy,
        expire_time_ns=None if one.pinned or other.pinned else max(expiries, default=None),
    )


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
