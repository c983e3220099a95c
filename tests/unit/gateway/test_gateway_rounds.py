"""The algorithm of an answer without a wire: whatever is drafted, in rounds of any length, the tokens are the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from gateway.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from gateway.exchange import Deadline
from gateway.policies import ExactPolicy
from gateway.rounds import Stages, answer
from gateway.statistics import Statistics
from gateway.values import (
    Delta,
    Draft,
    DraftMode,
    Event,
    Finished,
    FinishReason,
    Head,
    OpenedSequence,
    Question,
    Started,
    Verified,
)
from tests.fakes import ToyModel, toy_eos, toy_tokenizer

MODEL = ToyModel.of("The red square moves left and the 🙂 stands still.")
NUM_PROMPT_TOKENS = 7


class Verifier:
    """A verifier in memory that asserts where every round stands."""

    def __init__(self, room: int) -> None:
        first = MODEL.next(())
        self.opened = OpenedSequence("s", 4, NUM_PROMPT_TOKENS, (2, 3, 4), first, room, prefill_us=0)
        self.answer: list[int] = []
        self.rounds: list[tuple[Head, Draft]] = []
        self.is_open = False

    @contextlib.asynccontextmanager
    async def open_sequence(self, question: Question, deadline: Deadline) -> AsyncIterator[Verifier]:
        self.is_open = True
        try:
            yield self
        finally:
            self.is_open = False

    async def verify(self, head: Head, draft: Draft) -> Verified:
        self.rounds.append((head, draft))
        assert head.round == len(self.rounds)
        del self.answer[head.base_len - NUM_PROMPT_TOKENS :]
        assert head.base_len == NUM_PROMPT_TOKENS + len(self.answer)
        self.answer += head.token_ids
        targets = [MODEL.next(self.answer)]
        for token_id in draft.token_ids:
            self.answer.append(token_id)
            targets.append(MODEL.next(self.answer))
        return Verified(tuple(targets))


class Drafts:
    """Drafts that are right for given numbers of tokens and wrong afterwards."""

    def __init__(self, num_right: list[int]) -> None:
        self.mode, self.notes = DraftMode.SPARSE, ()
        self._num_right = num_right
        self._answer: list[int] = []
        self.length: DraftLength = FixedDraftLength(5)

    def draft_length(self) -> DraftLength:
        return self.length

    @contextlib.asynccontextmanager
    async def open(self, question: Question, sequence: OpenedSequence) -> AsyncIterator[Drafts]:
        yield self

    async def draft(self, head: Head, num_draft_tokens: int) -> Draft:
        self._answer += head.committed_ids
        num_right = self._num_right[head.round % len(self._num_right)] if self._num_right else 0
        drafted: list[int] = []
        for index in range(num_draft_tokens):
            token_id = MODEL.next([*self._answer, *drafted])
            drafted.append(token_id if index < num_right else 1)
        return Draft(tuple(drafted))


def served_by(verifier: Verifier) -> SimpleNamespace:
    return SimpleNamespace(
        opener=verifier,
        tokenizer=toy_tokenizer(),
        info=SimpleNamespace(eos_token_ids=frozenset({toy_eos()})),
        room_for_answer=lambda opened: opened.room,
    )


def run(verifier: Verifier, drafts: Drafts, question: Question) -> list[Event]:
    async def collect() -> list[Event]:
        stages = Stages(served_by(verifier), drafts, ExactPolicy(), Deadline())
        return [event async for event in answer(question, stages, Statistics())]

    return asyncio.run(collect())


@given(
    st.lists(st.integers(0, 6), max_size=9),
    st.integers(1, 6),
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([FixedDraftLength, lambda first: AdaptiveDraftLength(first, 9)]),
)
def test_rounds_of_any_kind_give_plain_decoding(
    num_right: list[int], num_draft_tokens: int, max_tokens: int, room: int, length: Callable[[int], DraftLength]
) -> None:
    verifier = Verifier(room)
    question = Question("contexts/a", "?", max_tokens=max_tokens)
    drafts = Drafts(num_right)
    drafts.length = length(num_draft_tokens)
    started, *deltas, finished = run(verifier, drafts, question)
    assert started == Started(NUM_PROMPT_TOKENS, 4)
    assert isinstance(finished, Finished)
    assert all(isinstance(delta, Delta) for delta in deltas)
    sent = tuple(token.id for delta in deltas for token in delta.tokens)
    limit = min(max_tokens, room)
    assert sent == MODEL.answer(limit)
    ended = len(MODEL.answer(1000)) < limit
    assert finished.finish_reason is (FinishReason.EOS if ended else FinishReason.LENGTH)
    assert not verifier.is_open
    for head, draft in verifier.rounds:
        assert head.base_len + 1 + len(draft.token_ids) <= NUM_PROMPT_TOKENS + limit


def test_closing_an_answer_closes_its_sequence() -> None:
    verifier = Verifier(100)

    async def look_and_leave() -> None:
        stages = Stages(served_by(verifier), Drafts([3]), ExactPolicy(), Deadline())
        events = answer(Question("contexts/a", "?"), stages, Statistics())
        async with contextlib.aclosing(events):
            await anext(events)
            assert verifier.is_open
        assert not verifier.is_open

    asyncio.run(look_and_leave())
