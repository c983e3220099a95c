"""Where drafts come from: a drafter service, n-grams, or nowhere; and what happens when a drafter is lost.

No drafter can end an answer, nor change it under an exact policy. The first failure of a drafter service (gone, late,
out of step) makes this one answer go on with n-gram drafts, and leaves a note. Of several drafters an answer gets the
least busy one that shares memory with its verifier.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Protocol

from foveate.rpc.errors import FoveateError
from gateway.clients import DrafterClient, DrafterSequence
from gateway.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from gateway.exchange import Deadline
from gateway.facts import DrafterInfo
from gateway.ngram import NgramIndex
from gateway.patience import Patience
from gateway.values import (
    MAX_DRAFT_TOKENS,
    SERVICE_MODES,
    Draft,
    Drafting,
    DraftMode,
    Head,
    OpenedSequence,
    Question,
    SelectionMethod,
)

_SMALL_TIMES = 10


class Drafter(Protocol):
    """Proposes tokens for one answer."""

    @property
    def mode(self) -> DraftMode:
        """What drafts come from now."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know about the drafting of this answer."""

    async def draft(self, head: Head, num_draft_tokens: int) -> Draft:
        """Returns at most `num_draft_tokens` tokens to follow `head`, maybe none. Called once a round; never raises."""


@dataclass(frozen=True)
class NoDrafter:
    """Plain decoding."""

    mode: DraftMode = DraftMode.OFF
    notes: tuple[str, ...] = ()

    async def draft(self, head: Head, num_draft_tokens: int) -> Draft:
        """Returns no tokens."""
        return Draft()


class NgramDrafter:
    """Drafts from the question and the answer so far."""

    mode = DraftMode.NGRAM

    def __init__(self, prompt_token_ids: tuple[int, ...], notes: tuple[str, ...] = ()) -> None:
        self.notes = notes
        self._index = NgramIndex(prompt_token_ids)

    def observe(self, head: Head) -> None:
        """Takes in what the last round committed."""
        self._index.extend(head.committed_ids)

    def propose(self, num_draft_tokens: int) -> Draft:
        """Returns what followed the longest run that ends the answer so far, when that run was seen before."""
        return Draft(self._index.propose(num_draft_tokens))

    async def draft(self, head: Head, num_draft_tokens: int) -> Draft:
        """Returns the draft of `Drafter.draft`."""
        self.observe(head)
        return self.propose(num_draft_tokens)


class ServiceDrafter:
    """Drafts from the drafter service for as long as it works, then from n-grams."""

    def __init__(
        self,
        sequence: DrafterSequence,
        ngram: NgramDrafter,
        *,
        mode: DraftMode,
        peer: DrafterPeer,
        vocab_size: int,
    ) -> None:
        self.notes: tuple[str, ...] = ()
        self._mode = mode
        self._sequence: DrafterSequence | None = sequence
        self._ngram = ngram
        self._peer = peer
        self._patience = peer.patience
        self._vocab_size = vocab_size
        self._behind = _Behind()

    @property
    def mode(self) -> DraftMode:
        """What the service drafts from, until it is lost."""
        return DraftMode.NGRAM if self._sequence is None else self._mode

    async def draft(self, head: Head, num_draft_tokens: int) -> Draft:
        """Returns the draft of `Drafter.draft`."""
        self._ngram.observe(head)
        if self._sequence is None:
            return self._ngram.propose(num_draft_tokens)
        self._behind = self._behind.caught_up(head)
        if num_draft_tokens == 0:
            return Draft()
        asked, self._behind = self._behind.head, self._behind.asked()
        try:
            return await self._draft(self._sequence, asked, num_draft_tokens)
        except TimeoutError:
            self._peer.is_ready = False
            self._lose(self._sequence, f"no draft within {self._patience.timeout_s * 1e3:.0f} ms in round {head.round}")
        except FoveateError as error:
            self._lose(self._sequence, f"{error.reason} in round {head.round}")
        return self._ngram.propose(num_draft_tokens)

    async def _draft(self, sequence: DrafterSequence, head: Head, num_draft_tokens: int) -> Draft:
        with self._patience.timing():
            async with asyncio.timeout(self._patience.timeout_s):
                draft = await sequence.draft(head, num_draft_tokens)
        if any(token_id >= self._vocab_size for token_id in draft.token_ids):
            raise sequence.wrong("drafted a token that does not exist")
        return draft

    def _lose(self, sequence: DrafterSequence, why: str) -> None:
        sequence.cancel()
        self._sequence = None
        self.notes = (f"the drafter was lost ({why}); the answer went on with n-gram drafts",)


_NO_HEAD = Head(0, 0, (), ())


@dataclass(frozen=True)
class _Behind:
    """What the drafter service is told of the answer: it counts the rounds it is asked in, and hears of others later.

    After rounds without it, its next round starts where the first of them did, with all tokens committed since.
    """

    num_asked: int = 0
    head: Head = _NO_HEAD
    is_told: bool = True

    def caught_up(self, head: Head) -> _Behind:
        """Returns the service's own head for the answer's `head`."""
        base_len, token_ids = head.base_len, head.token_ids
        if not self.is_told:
            base_len, token_ids = self.head.base_len, self.head.token_ids + head.committed_ids
        return _Behind(self.num_asked, Head(self.num_asked + 1, base_len, token_ids, token_ids), is_told=False)

    def asked(self) -> _Behind:
        """Returns what is so once the service has been asked with `head`."""
        return _Behind(self.num_asked + 1, self.head, is_told=True)


@dataclass(frozen=True)
class DefaultBudgets:
    """Share of visual tokens that drafts are made from when the request does not say."""

    shared: float  # of the verifier's KV
    small: float  # of a small model's pruned video

    def of(self, mode: DraftMode) -> float:
        """Returns the share for a mode."""
        return self.small if mode is DraftMode.SMALL else self.shared


class DrafterPeer:
    """One drafter service. `is_ready` follows its health, `kinds` are those that fit the verifier."""

    def __init__(self, client: DrafterClient, patience: Patience) -> None:
        self.client = client
        self.patience = patience
        self.is_ready = False
        self.refusal = ""  # why a drafter that is there is not used
        self.kinds: frozenset[DraftMode] = frozenset()
        self.max_draft_tokens = 0
        self.shm_namespace = ""
        self.num_open = 0  # answers of this gateway

    def admit(self, info: DrafterInfo, kinds: frozenset[DraftMode]) -> None:
        """Uses the drafter from now on, for `kinds`."""
        self.kinds = kinds
        self.max_draft_tokens = info.max_draft_tokens
        self.shm_namespace = info.shm_namespace
        self.refusal = ""
        self.is_ready = True

    def refuse(self, why: str) -> None:
        """Does not use the drafter; `why` is empty when it is simply not there."""
        self.is_ready = False
        self.refusal = why


class Drafters:
    """The drafter services as answers see them."""

    def __init__(
        self, *, is_configured: bool, floor_s: float, attach_timeout_s: float, budgets: DefaultBudgets
    ) -> None:
        """`floor_s` is the least time to wait for a draft."""
        self.attach_timeout_s = attach_timeout_s
        self._peers: dict[DrafterClient, DrafterPeer] = {}
        self._is_configured = is_configured
        self._floor_s = floor_s
        self._budgets = budgets

    @property
    def peers(self) -> tuple[DrafterPeer, ...]:
        """The drafters there are, ready or not."""
        return tuple(self._peers.values())

    def join(self, client: DrafterClient) -> DrafterPeer:
        """Takes in a drafter, which is not ready yet."""
        peer = self._peers[client] = DrafterPeer(client, Patience(self._floor_s))
        return peer

    def leave(self, client: DrafterClient) -> None:
        """Uses a drafter for no further answer."""
        self._peers.pop(client).refuse("")

    @property
    def num_ready(self) -> int:
        """Number of drafters that are ready."""
        return len(self._ready())

    @property
    def is_ready(self) -> bool:
        """Whether a drafter is ready."""
        return self.num_ready > 0

    @property
    def kinds(self) -> frozenset[DraftMode]:
        """Kinds of drafts that services make now."""
        return frozenset[DraftMode]().union(*(peer.kinds for peer in self._ready()))

    @property
    def modes(self) -> frozenset[DraftMode]:
        """What drafts can come from now."""
        return frozenset({DraftMode.OFF, DraftMode.NGRAM}) | self.kinds

    @property
    def refusal(self) -> str:
        """Why a drafter that is there is not used; empty when none is refused."""
        return next((peer.refusal for peer in self.peers if peer.refusal), "")

    def best_first(self, mode: DraftMode, kv_namespace: str) -> list[DrafterPeer]:
        """Returns who can draft: first who shares memory with the verifier, of those the least busy."""
        able = [peer for peer in self._ready() if mode in peer.kinds]
        return sorted(able, key=lambda peer: (peer.shm_namespace != kv_namespace, peer.num_open))

    def _ready(self) -> list[DrafterPeer]:
        return [peer for peer in self.peers if peer.is_ready]

    def plan(self, asked: Drafting, *, deadline: Deadline, vocab_size: int) -> DraftPlan:
        """Returns how to draft an answer as things are."""
        is_default = asked.mode is DraftMode.DEFAULT and self._is_configured
        wanted = self._default_mode() if is_default else asked.mode
        if wanted in self.kinds:
            budget = self._budgets.of(wanted) if asked.visual_budget is None else asked.visual_budget
            planned = replace(self._clipped(asked), mode=wanted, visual_budget=budget)
            return DraftPlan(_with_selection(planned), (), self, deadline, vocab_size)
        mode = DraftMode.OFF if asked.mode is DraftMode.OFF else DraftMode.NGRAM
        notes = (self._why_not(wanted),) if wanted in SERVICE_MODES else ()
        return DraftPlan(replace(asked, mode=mode), notes, self, deadline, vocab_size)

    def _clipped(self, asked: Drafting) -> Drafting:
        """Returns the drafting with lengths that the service takes."""
        limits = [peer.max_draft_tokens for peer in self._ready() if peer.max_draft_tokens]
        limit = min([MAX_DRAFT_TOKENS, *limits])
        most = None if asked.max_draft_tokens is None else min(asked.max_draft_tokens, limit)
        return replace(asked, num_draft_tokens=min(asked.num_draft_tokens, limit), max_draft_tokens=most)

    def _default_mode(self) -> DraftMode:
        """The first kind that is offered, sparse before all."""
        return min(self.kinds, key=SERVICE_MODES.index, default=DraftMode.SPARSE)

    def _why_not(self, mode: DraftMode) -> str:
        if self.is_ready:
            return f"the drafter offers no {mode.name.lower()} drafts; the answer used n-gram drafts"
        if self.refusal:
            return f"the drafter is not used: {self.refusal}; the answer used n-gram drafts"
        return "no drafter is reachable; the answer used n-gram drafts"


def _with_selection(drafting: Drafting) -> Drafting:
    """Returns the drafting with the selection that is its mode's default, when none was asked for."""
    if drafting.mode is DraftMode.SMALL and drafting.selection is SelectionMethod.DEFAULT:
        return replace(drafting, selection=SelectionMethod.TWO_STAGE)
    return drafting


@dataclass(frozen=True)
class DraftPlan:
    """How one answer will be drafted: `drafting` with a mode that is possible now."""

    drafting: Drafting
    notes: tuple[str, ...]
    drafters: Drafters
    deadline: Deadline
    vocab_size: int

    def draft_length(self) -> DraftLength:
        """Returns what chooses the length of the answer's drafts."""
        first, most = self.drafting.num_draft_tokens, self.drafting.max_draft_tokens
        return FixedDraftLength(first) if most is None else AdaptiveDraftLength(first, most)

    @contextlib.asynccontextmanager
    async def open(self, question: Question, sequence: OpenedSequence) -> AsyncIterator[Drafter]:
        """Opens the drafter for a sequence; it lives as long as the block. A drafter that cannot be had is replaced."""
        if self.drafting.mode is DraftMode.OFF:
            yield NoDrafter()
            return
        ngram = NgramDrafter(sequence.prompt_token_ids, self.notes)
        async with contextlib.AsyncExitStack() as stack:
            drafter: Drafter = ngram
            if self.drafting.mode in SERVICE_MODES:
                drafter = await self._attach(question, sequence, ngram, stack)
            yield drafter

    async def _attach(
        self, question: Question, sequence: OpenedSequence, ngram: NgramDrafter, stack: contextlib.AsyncExitStack
    ) -> Drafter:
        # A small model runs its vision tower over a video that it has not seen yet.
        mode, is_small = self.drafting.mode, self.drafting.mode is DraftMode.SMALL
        timeout_s = self.drafters.attach_timeout_s * (_SMALL_TIMES if is_small else 1)
        why = "it is gone"
        for peer in self.drafters.best_first(mode, sequence.kv_namespace):
            try:
                async with contextlib.AsyncExitStack() as trying:
                    peer.num_open += 1  # before it has attached: those that come meanwhile go elsewhere
                    trying.callback(_close, peer)
                    attached = await trying.enter_async_context(
                        peer.client.attach(question, sequence, deadline=self.deadline, attach_timeout_s=timeout_s)
                    )
                    stack.push_async_exit(trying.pop_all())
            except TimeoutError:  # not tried elsewhere: the answer has waited long enough
                peer.is_ready = False
                ngram.notes = (f"the drafter did not attach within {timeout_s:g} s; the answer used n-gram drafts",)
                return ngram
            except FoveateError as error:
                why = error.reason
            else:
                return ServiceDrafter(attached, ngram, mode=mode, peer=peer, vocab_size=self.vocab_size)
        ngram.notes = (f"the drafter did not attach ({why}); the answer used n-gram drafts",)
        return ngram


def _close(peer: DrafterPeer) -> None:
    peer.num_open -= 1
