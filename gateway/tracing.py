"""The stages of an answer with their times written down. Only recorded answers run through here; others pay nothing.

A round's spans: draft (waiting for the drafter included), verify, policy, detokenize (stops and text of what was kept).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, cast

from foveate.telemetry import conventions as names
from foveate.telemetry.spans import SpanLog
from gateway.drafters import Drafter, DraftPlan
from gateway.exchange import Deadline
from gateway.policies import LOOSE_ORIGINS, Decision, Memory, Policy
from gateway.rounds import Stages
from gateway.sequences import OpenSequence, SequenceOpener
from gateway.statistics import Statistics
from gateway.values import AcceptancePolicy, Draft, DraftMode, Head, OpenedSequence, Question, Signals, Verified


class RoundLog:
    """Writes down the rounds of one answer."""

    def __init__(self, log: SpanLog) -> None:
        self._log = log
        self._round = 1
        self._decided_ns = 0

    def drafted(self, start_ns: int, mode: DraftMode, draft: Draft) -> None:
        """Writes a draft down, which has just come."""
        length = len(draft.token_ids)
        self._add(
            names.SPAN_DRAFT,
            start_ns,
            {names.DRAFT_MODE: mode.name, names.DRAFT_LENGTH: length, names.MODEL_US: draft.model_us},
        )

    def verified(self, start_ns: int, draft: Draft, verified: Verified) -> None:
        """Writes a verification down, which has just ended."""
        length = len(draft.token_ids)
        self._add(names.SPAN_VERIFY, start_ns, {names.DRAFT_LENGTH: length, names.MODEL_US: verified.model_us})

    def decided(self, start_ns: int, decision: Decision, verified: Verified) -> None:
        """Writes a decision down; what follows until `committed` is stops and text."""
        self._decided_ns = time.time_ns()
        num_loose = sum(token.origin in LOOSE_ORIGINS for token in decision.tokens)
        attributes: dict[str, str | int | float] = {
            names.NUM_ACCEPTED_TOKENS: decision.num_accepted,
            names.NUM_LOOSE_TOKENS: num_loose,
        }
        relevance = verified.measured.relevance
        if relevance:
            attributes[names.RELEVANCE_MAX] = max(relevance)
            attributes[names.RELEVANCE_MEAN] = sum(relevance) / len(relevance)
        self._add(names.SPAN_POLICY, start_ns, attributes)

    def committed(self, num_kept: int) -> None:
        """Writes down that the decision's tokens are text; the round is over."""
        self._add(names.SPAN_DETOKENIZE, self._decided_ns, {names.NUM_TOKENS: num_kept})
        self._round += 1

    def attached(self, start_ns: int, mode: DraftMode) -> None:
        """Writes down that a drafter is there, or that there is none."""
        self._log.add(names.SPAN_ATTACH, start_ns, time.time_ns(), {names.DRAFT_MODE: mode.name})

    def _add(self, name: str, start_ns: int, attributes: Mapping[str, str | int | float]) -> None:
        self._log.add(name, start_ns, time.time_ns(), {names.ROUND: self._round, **attributes})


def recorded(stages: Stages, stats: Statistics, log: SpanLog) -> tuple[Stages, Statistics]:
    """Returns stages and statistics that write to `log` what they do."""
    rounds = RoundLog(log)
    served = replace(stages.served, opener=_Opener(stages.served.opener, rounds))
    drafts = cast(DraftPlan, _Drafts(stages.drafts, rounds))
    traced = replace(stages, served=served, drafts=drafts, policy=_Policy(stages.policy, rounds))
    return traced, cast(Statistics, _Statistics(stats, rounds))


class _Opener:
    def __init__(self, inner: SequenceOpener, rounds: RoundLog) -> None:
        self._inner = inner
        self._rounds = rounds

    @contextlib.asynccontextmanager
    async def open_sequence(self, question: Question, deadline: Deadline) -> AsyncIterator[_Sequence]:
        async with self._inner.open_sequence(question, deadline) as sequence:
            yield _Sequence(sequence, self._rounds)


class _Sequence:
    def __init__(self, inner: OpenSequence, rounds: RoundLog) -> None:
        self.opened = inner.opened
        self._inner = inner
        self._rounds = rounds

    async def verify(self, head: Head, draft: Draft) -> Verified:
        start_ns = time.time_ns()
        verified = await self._inner.verify(head, draft)
        self._rounds.verified(start_ns, draft, verified)
        return verified


class _Drafts:
    def __init__(self, inner: DraftPlan, rounds: RoundLog) -> None:
        self._inner = inner
        self._rounds = rounds

    @contextlib.asynccontextmanager
    async def open(self, question: Question, sequence: OpenedSequence) -> AsyncIterator[_Drafter]:
        start_ns = time.time_ns()
        async with self._inner.open(question, sequence) as drafter:
            self._rounds.attached(start_ns, drafter.mode)
            yield _Drafter(drafter, self._rounds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Drafter:
    def __init__(self, inner: Drafter, rounds: RoundLog) -> None:
        self._inner = inner
        self._rounds = rounds

    @property
    def mode(self) -> DraftMode:
        return self._inner.mode

    @property
    def notes(self) -> tuple[str, ...]:
        return self._inner.notes

    async def draft(self, head: Head, num_draft_tokens: int) -> Draft:
        start_ns = time.time_ns()
        draft = await self._inner.draft(head, num_draft_tokens)
        self._rounds.drafted(start_ns, self._inner.mode, draft)
        return draft


class _Policy:
    def __init__(self, inner: Policy, rounds: RoundLog) -> None:
        self._inner = inner
        self._rounds = rounds

    @property
    def kind(self) -> AcceptancePolicy:
        return self._inner.kind

    @property
    def signals(self) -> Signals:
        return self._inner.signals

    def decide(self, draft: Draft, verified: Verified, memory: Memory) -> Decision:
        start_ns = time.time_ns()
        decision = self._inner.decide(draft, verified, memory)
        self._rounds.decided(start_ns, decision, verified)
        return decision


class _Statistics:
    def __init__(self, inner: Statistics, rounds: RoundLog) -> None:
        self._inner = inner
        self._rounds = rounds

    def add_round(self, draft: Draft, verified: Verified, decision: Decision, num_kept: int) -> None:
        self._inner.add_round(draft, verified, decision, num_kept)
        self._rounds.committed(num_kept)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
