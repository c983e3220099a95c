"""An answer that outlives its verifier: when one is lost, the next goes on from the last committed token.

    first verifier    open, round 1, 2, 3, lost in round 4
    next verifier     open with the tokens that have KV, round 4 as its round 1, 5 as its 2, ...

The rounds see one sequence. The tokens are those that the first verifier would have given: greedy because the same
model sees the same tokens, sampled because the noise is keyed by seed and position. A drafter that mapped the lost
verifier's memory falls away with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from foveate.rpc.errors import FoveateError, Internal, NotFound, Unavailable
from gateway.exchange import VERIFIER_LOST, Deadline
from gateway.sequences import OpenSequence, SequenceOpener
from gateway.values import Draft, Head, OpenedSequence, Question, Verified
from gateway.waiting import NO_VERIFIER, no_verifier, patience_s

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_LOST_POLL_S = 0.4  # long enough for the health of a verifier that broke off to be looked at in between
_MAX_OPENS_LOST = 3  # a verifier that is well, and breaks off all the same
_MAX_LOSSES = 4  # an answer that loses more verifiers than that is likely the reason


@dataclass(frozen=True)
class Route:
    """A verifier that an answer can go to."""

    pool_id: str
    opener: SequenceOpener


class Routes(Protocol):
    """Where a question can go, the best first, as things are now; told what came of it."""

    async def best_first(self, context: str) -> Sequence[Route]:
        """Returns every verifier that is ready."""

    def opened(self, route: Route, question: Question, opened: OpenedSequence) -> None:
        """An answer opened there."""

    def closed(self, route: Route, took_s: float) -> None:
        """An answer there has ended, whichever way, `took_s` after it opened."""

    def not_held(self, route: Route, context: str) -> None:
        """The verifier does not have the context."""

    def lost(self, route: Route) -> None:
        """The verifier broke off."""

    @property
    def may_recover(self) -> bool:
        """Whether another verifier, or the same one anew, could go on with an answer that was lost."""


class FailoverOpener:
    """Opens sequences on the best verifier, and on the next when one is lost, for which it waits `wait_s` at most.

    An answer that has not begun waits for a verifier until its deadline, or `open_wait_s` when it has none.
    """

    def __init__(self, routes: Routes, *, wait_s: float, open_wait_s: float) -> None:
        self._routes = routes
        self._wait_s = wait_s
        self._open_wait_s = open_wait_s

    @contextlib.asynccontextmanager
    async def open_sequence(self, question: Question, deadline: Deadline) -> AsyncIterator[OpenSequence]:
        """Prefills the question where its context is; the sequence lives as long as the block.

        Raises NotFound when no verifier has the context nor can get it, and what else opening raises.
        """
        async with contextlib.AsyncExitStack() as stack:
            sequence = _Lasting(self._routes, question, deadline, wait_s=self._wait_s, stack=stack)
            await sequence.open(patience_s(deadline.remaining_s(), self._open_wait_s))
            yield sequence


class _Lasting:
    """One answer's sequence over the verifiers it has been on."""

    def __init__(
        self,
        routes: Routes,
        question: Question,
        deadline: Deadline,
        *,
        wait_s: float,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        self.opened: OpenedSequence
        self._routes = routes
        self._question = question
        self._deadline = deadline
        self._wait_s = wait_s
        self._stack = stack
        self._now: OpenSequence
        self._route: Route
        self._leave: Callable[[], Awaitable[object]]
        self._committed: list[int] = []  # tokens of the answer that rounds have begun from
        self._num_losses = 0
        self._num_rounds_before = 0  # rounds that earlier verifiers have run

    async def open(self, wait_s: float) -> None:
        """Opens on the best verifier; waits `wait_s` for one while all are away."""
        give_up_s, num_lost = time.monotonic() + wait_s, 0
        while (error := await self._try_all(self._question)) is not None:
            is_lost = error.reason == VERIFIER_LOST
            num_lost += is_lost
            may_pass = is_lost or error.reason == NO_VERIFIER
            poll_s = _LOST_POLL_S if is_lost else _POLL_S
            if not may_pass or num_lost >= _MAX_OPENS_LOST or time.monotonic() + poll_s > give_up_s:
                raise error
            await asyncio.sleep(poll_s)
        self.opened = self._now.opened

    async def verify(self, head: Head, draft: Draft) -> Verified:
        """Returns the target's choices, from the next verifier when this one is lost."""
        self._committed.extend(head.committed_ids)
        while True:
            try:
                return await self._now.verify(self._renumbered(head), draft)
            except Unavailable as error:
                self._num_losses += 1
                logger.warning("a verifier was lost in round %d: %s", head.round, error)
                self._routes.lost(self._route)
                if self._num_losses > _MAX_LOSSES:
                    raise
                await self._reopen(head, error)

    def _renumbered(self, head: Head) -> Head:
        return replace(head, round=head.round - self._num_rounds_before)

    async def _reopen(self, head: Head, error: Unavailable) -> None:
        """Opens the sequence anew with the tokens whose KV the head keeps."""
        await self._leave()
        num_kept = head.base_len - self.opened.num_prompt_tokens
        going_on = replace(self._question, answer_token_ids=tuple(self._committed[:num_kept]))
        await self._enter_next(going_on, error)
        if self._now.opened.num_prompt_tokens != head.base_len:
            raise Internal("the next verifier counts the prompt's tokens differently", reason="PEER_PROTOCOL")
        if self._now.opened.is_context_lossy:
            self.opened = replace(self.opened, is_context_lossy=True)
        self._num_rounds_before = head.round - 1

    async def _enter_next(self, question: Question, lost: Unavailable) -> None:
        """Opens on the first verifier that can; waits a while for one to come where that can help."""
        give_up_s = time.monotonic() + (self._wait_s if self._routes.may_recover else 0.0)
        while await self._try_all(question) is not None:
            if time.monotonic() >= give_up_s:
                raise lost
            await asyncio.sleep(_POLL_S)

    async def _try_all(self, question: Question) -> FoveateError | None:
        """Tries every verifier that is ready; returns why the most helpful of them could not."""
        failure: FoveateError | None = None
        for route in await self._routes.best_first(question.context):
            entered = contextlib.AsyncExitStack()
            try:
                self._now = await entered.enter_async_context(route.opener.open_sequence(question, self._deadline))
            except NotFound as error:
                self._routes.not_held(route, question.context)
                failure = failure or error
            except Unavailable as error:
                if error.reason == VERIFIER_LOST:
                    self._routes.lost(route)
                failure = error
            else:
                self._settle(route, question, entered)
                return None
        return failure or no_verifier()

    def _settle(self, route: Route, question: Question, entered: contextlib.AsyncExitStack) -> None:
        began_s = time.monotonic()
        entered.callback(lambda: self._routes.closed(route, time.monotonic() - began_s))
        self._route = route
        self._routes.opened(route, question, self._now.opened)
        # Left with the answer, or before it when the verifier is lost; leaving twice does nothing.
        self._stack.push_async_exit(entered)
        self._leave = entered.aclose
