"""Where drafts come from: the sparse drafter, n-grams, or nowhere; and what happens when a drafter is lost.

No drafter can change an answer or end it. The first failure of the sparse drafter (gone, late, out of step) makes this
one answer go on with n-gram drafts, and leaves a note.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Protocol

from foveate.rpc.errors import FoveateError
from gateway.clients import DrafterClient, DrafterSequence
from gateway.exchange import Deadline
from gateway.ngram import NgramIndex
from gateway.patience import Patience
from gateway.values import Draft, Drafting, DraftMode, Head, OpenedSequence, Question


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


class SparseDrafter:
    """Drafts from the drafter service for as long as it works, then from n-grams."""

    def __init__(self, sequence: DrafterSequence, ngram: NgramDrafter, *, drafters: Drafters, vocab_size: int) -> None:
        self.notes: tuple[str, ...] = ()
        self._sequence: DrafterSequence | None = sequence
        self._ngram = ngram
        self._drafters = drafters
        self._patience = drafters.patience
        self._vocab_size = vocab_size

    @property
    def mode(self) -> DraftMode:
        """SPARSE until the drafter is lost."""
        return DraftMode.NGRAM if self._sequence is None else DraftMode.SPARSE

    async def draft(self, head: Head, num_draft_tokens: int) -> Draft:
        """Returns the draft of `Drafter.draft`."""
        self._ngram.observe(head)
        if self._sequence is None or num_draft_tokens == 0:
            return self._ngram.propose(num_draft_tokens)
        try:
            return await self._draft(self._sequence, head, num_draft_tokens)
        except TimeoutError:
            self._drafters.suspect()
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


class Drafters:
    """The drafter service as answers see it. `is_ready` follows its health."""

    def __init__(self, client: DrafterClient | None, *, patience: Patience, attach_timeout_s: float) -> None:
        self.is_ready = False
        self.max_draft_tokens = 0
        self.client = client
        self.patience = patience
        self.attach_timeout_s = attach_timeout_s

    def suspect(self) -> None:
        """Keeps new answers from waiting for a drafter that did not answer, until its health is looked at again."""
        self.is_ready = False

    def plan(self, asked: Drafting, *, deadline: Deadline, vocab_size: int) -> DraftPlan:
        """Returns how to draft an answer as things are."""
        wants_sparse = asked.mode is DraftMode.SPARSE or (asked.mode is DraftMode.DEFAULT and self.client is not None)
        if self.is_ready and wants_sparse:
            length = min(asked.num_draft_tokens, self.max_draft_tokens or asked.num_draft_tokens)
            planned = replace(asked, mode=DraftMode.SPARSE, num_draft_tokens=length)
            return DraftPlan(planned, (), self, deadline, vocab_size)
        mode = DraftMode.OFF if asked.mode is DraftMode.OFF else DraftMode.NGRAM
        notes = ("no drafter is reachable; the answer used n-gram drafts",) if wants_sparse else ()
        return DraftPlan(replace(asked, mode=mode), notes, self, deadline, vocab_size)


@dataclass(frozen=True)
class DraftPlan:
    """How one answer will be drafted: `drafting` with a mode that is possible now."""

    drafting: Drafting
    notes: tuple[str, ...]
    drafters: Drafters
    deadline: Deadline
    vocab_size: int

    @contextlib.asynccontextmanager
    async def open(self, question: Question, sequence: OpenedSequence) -> AsyncIterator[Drafter]:
        """Opens the drafter for a sequence; it lives as long as the block. A drafter that cannot be had is replaced."""
        if self.drafting.mode is DraftMode.OFF:
            yield NoDrafter()
            return
        ngram = NgramDrafter(sequence.prompt_token_ids, self.notes)
        async with contextlib.AsyncExitStack() as stack:
            drafter: Drafter = ngram
            if self.drafting.mode is DraftMode.SPARSE and self.drafters.client is not None:
                drafter = await self._attach(self.drafters.client, question, sequence, ngram, stack)
            yield drafter

    async def _attach(
        self,
        client: DrafterClient,
        question: Question,
        sequence: OpenedSequence,
        ngram: NgramDrafter,
        stack: contextlib.AsyncExitStack,
    ) -> Drafter:
        timeout_s = self.drafters.attach_timeout_s
        try:
            attached = await stack.enter_async_context(
                client.attach(question, sequence, deadline=self.deadline, attach_timeout_s=timeout_s)
            )
        except TimeoutError:
            self.drafters.suspect()
            ngram.notes = (f"the drafter did not attach within {timeout_s:g} s; the answer used n-gram drafts",)
        except FoveateError as error:
            ngram.notes = (f"the drafter did not attach ({error.reason}); the answer used n-gram drafts",)
        else:
            return SparseDrafter(attached, ngram, drafters=self.drafters, vocab_size=self.vocab_size)
        return ngram
