"""A Verify stream's life: open once, then rounds, then everything freed, however it ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from engine.kv_pool import SelectionSlab
from engine.sampling import Sampling
from engine.scheduler import Scheduler
from engine.selection import SelectionMethod
from foveate.context_source import ContextFetch
from foveate.rpc.admission import refuse_beyond
from foveate.rpc.errors import FailedPrecondition, ResourceExhausted
from foveate.telemetry import conventions as names
from foveate.telemetry.spans import UNTOLD, Attributes, current_log, write
from verifier_svc.config import VerifierConfig
from verifier_svc.contexts import HeldContext
from verifier_svc.engine_parts import EngineParts
from verifier_svc.memory import Memory, SlabLease
from verifier_svc.prefill import PATCHES
from verifier_svc.prompt import ThreadPrompt, Turn
from verifier_svc.round_guard import Round, RoundGuard, Verified
from verifier_svc.sequences import Opened, Sequence, Video, thread_capacity
from verifier_svc.signals import Signals
from verifier_svc.threads import ParkedThreads


@dataclass(frozen=True)
class OpenRequest:
    """What a gateway asks for; exactly one of `num_selected` and `visual_budget` is set when a selection is wanted.

    `answer_token_ids` are an answer's tokens that are committed already: they are prefilled after the prompt.
    """

    context_id: str
    history: tuple[Turn, ...]
    question: str
    sampling: Sampling
    max_tokens: int
    num_selected: int | None
    visual_budget: float | None
    selection: SelectionMethod
    signals: Signals
    wants_video: bool
    tenant: str = ""
    answer_token_ids: tuple[int, ...] = ()
    keep_thread: bool = False
    fork_of: str = ""

    def num_selected_of(self, num_visual: int) -> int | None:
        """Returns how many of `num_visual` entries to select; None when no selection is wanted."""
        if self.visual_budget is not None:
            return max(1, round(self.visual_budget * num_visual)) if self.visual_budget > 0 else 0
        return None if self.num_selected is None else min(self.num_selected, num_visual)


class Sessions:
    """Makes sessions and counts the open ones; `on_idle` is called when the last has closed."""

    def __init__(
        self,
        parts: EngineParts,
        config: VerifierConfig,
        *,
        scheduler: Scheduler,
        obtain: Callable[[str, str], Awaitable[tuple[HeldContext, ContextFetch]]],
        give_back: Callable[[HeldContext], None],
        memory: Memory,
        threads: ParkedThreads,
        on_idle: Callable[[], None],
    ) -> None:
        self.parts = parts
        self.config = config
        self.scheduler = scheduler
        self.device = scheduler.device
        self.obtain = obtain
        self.give_back = give_back
        self.memory = memory
        self.threads = threads
        self._on_idle = on_idle
        self._ids = itertools.count(1)
        self.sequences: dict[str, Sequence] = {}  # that are open, by id
        self.num_open = 0

    def opened(self) -> str:
        """Counts a session that opens; returns an id unique in the pool's life. Raises ResourceExhausted."""
        refuse_beyond(self.config.max_sequences, self.num_open)
        self.num_open += 1
        return f"{self.parts.pool.handle.pool_id}-{next(self._ids)}"

    def closed(self) -> None:
        """Counts a session that has closed."""
        self.num_open -= 1
        if self.num_open == 0:
            self._on_idle()


class Session:
    """One stream's sequence. Use as an async context manager: leaving it frees the memory after the running step."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._lease = SlabLease(sessions.parts.pool)
        self._is_counted = False
        self._held: HeldContext | None = None
        self._sequence: Sequence | None = None
        self._guard: RoundGuard | None = None
        self._keeps_thread = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._keeps_thread and self._held is not None and self._sequence is not None:
            # The stream has ended in order, so no step of ours is queued any more.
            parked = self._sequence.parked()
            self._lease.hand_over(parked.slab)
            self._sessions.threads.park(parked)
        if self._sequence is not None:
            del self._sessions.sequences[self._sequence.sequence_id]
        # A step of this sequence may be running: the lease is freed behind it in the device's queue.
        self._sessions.device.submit(self._lease.free_all)
        if self._held is not None:
            self._sessions.give_back(self._held)
            self._held = None
        if self._is_counted:
            self._is_counted = False
            self._sessions.closed()

    async def open(self, asked: OpenRequest) -> Opened:
        """Prefills history and question. NOT_FOUND without the context, RESOURCE_EXHAUSTED without room."""
        if self._is_counted:
            raise FailedPrecondition("the sequence is open already", reason="SEQUENCE_ALREADY_OPEN")
        start_ns = time.time_ns()
        sequence_id = self._sessions.opened()
        self._is_counted = True
        self._held, fetch = await self._sessions.obtain(asked.context_id, asked.tenant)
        held = self._held
        write(
            names.SPAN_CONTEXT_RESOLVE,
            start_ns,
            {names.TIER: fetch.source.name.lower(), names.CONTEXT: asked.context_id},
        )
        parts = self._sessions.parts
        prompt = await asyncio.to_thread(parts.prompts.thread, asked.history, asked.question)
        penalized = _penalized(asked.sampling, held, prompt, parts)
        prompt = prompt.followed_by(asked.answer_token_ids)
        room = self._room(prompt, asked.max_tokens)
        _check_signals(asked.signals, held, parts)
        video = _video(held, parts) if asked.wants_video else None
        sequence = Sequence(
            parts,
            held,
            sequence_id=sequence_id,
            prompt=prompt,
            sampling=asked.sampling,
            signals=asked.signals,
            penalized_token_ids=penalized,
        )
        opened = replace(await self._prefill(sequence, prompt, room, asked), video=video)
        self._sequence = self._sessions.sequences[sequence_id] = sequence
        self._keeps_thread = asked.keep_thread
        self._guard = RoundGuard(
            sequence_id=sequence_id,
            num_prompt_tokens=opened.num_prompt_tokens,
            max_len=opened.num_prompt_tokens + room + self._sessions.config.max_draft_tokens,
            max_draft_tokens=self._sessions.config.max_draft_tokens,
            vocab_size=parts.vocab_size,
        )
        return replace(opened, fetch=fetch, is_context_lossy=held.is_lossy)

    async def verify(self, asked: Round) -> Verified:
        """Runs a round, or repeats the reply of the round that was run last."""
        if self._guard is None or self._sequence is None:
            raise FailedPrecondition("open the sequence first", reason="SEQUENCE_NOT_OPEN")
        repeated = self._guard.admit(asked)
        if repeated is not None:
            return repeated
        reply = await self._sessions.scheduler.steps(self._sequence.verify(asked), names.SPAN_VERIFY, _round_of(asked))
        self._guard.record(asked, reply)
        return reply

    def _room(self, prompt: ThreadPrompt, max_tokens: int) -> int:
        """Returns how many tokens may follow the prompt: what was asked for, or what the thread's limit leaves."""
        limit = self._sessions.config.max_thread_tokens
        needed = len(prompt.token_ids) + 1
        if needed > limit:
            raise ResourceExhausted(
                f"history, question and one token of an answer need {needed} tokens; the limit is {limit}",
                reason="THREAD_TOO_LONG",
                metadata={"needed_tokens": str(needed), "limit_tokens": str(limit)},
            )
        return min(max_tokens, limit - len(prompt.token_ids))

    async def _prefill(self, sequence: Sequence, prompt: ThreadPrompt, room: int, asked: OpenRequest) -> Opened:
        sessions, held = self._sessions, self._held
        assert held is not None
        num_rows = len(prompt.token_ids) + room + sessions.config.max_draft_tokens
        sequence.begin(await sessions.memory.take(self._lease, thread_capacity(num_rows)))
        selection = await self._take_selection(asked.num_selected_of(held.facts.num_visual_tokens))
        num_reused = await self._fork(sequence, selection, asked) or await self._reuse(sequence, prompt, asked)
        opening = sequence.open(
            selection,
            asked.selection,
            num_reused=num_reused,
            chunk_tokens=sessions.config.prefill_chunk_tokens,
        )
        num_tokens = len(prompt.token_ids) - num_reused
        return await sessions.scheduler.turns(opening, names.SPAN_PREFILL, {names.NUM_TOKENS: num_tokens})

    async def _fork(self, sequence: Sequence, selection: SelectionSlab | None, asked: OpenRequest) -> int:
        """Copies what the sequence that is forked has; returns the number of rows, 0 when it has not what is needed."""
        origin = self._sessions.sequences.get(asked.fork_of)
        if origin is None or not sequence.can_fork(origin, selection, asked.selection):
            return 0
        # The origin may end now: its memory is freed behind this in the device's queue.
        return await self._sessions.device.run(sequence.fork, origin, selection, asked.selection)

    async def _reuse(self, sequence: Sequence, prompt: ThreadPrompt, asked: OpenRequest) -> int:
        """Copies the rows that a kept thread shares with the prompt, up to the question; returns their number."""
        before_question = prompt.token_ids[: prompt.question_rows.start]
        found = self._sessions.threads.longest(asked.context_id, before_question) if asked.keep_thread else None
        if found is None:
            return 0
        slab, num_rows = found
        await self._sessions.device.run(sequence.copy_rows, slab, num_rows)
        return num_rows

    async def _take_selection(self, num_selected: int | None) -> SelectionSlab | None:
        if not num_selected:  # an empty selection takes no memory
            return None if num_selected is None else SelectionSlab(0, 0)
        return await self._sessions.memory.take_selection(self._lease, num_selected)


def _check_signals(signals: Signals, held: HeldContext, parts: EngineParts) -> None:
    if signals.relevance and parts.relevance.tensor_name not in held.tensors:
        raise FailedPrecondition(
            "this verifier keeps no visual states, so it cannot measure relevance", reason="NO_VISUAL_STATES"
        )


def _penalized(sampling: Sampling, held: HeldContext, prompt: ThreadPrompt, parts: EngineParts) -> tuple[int, ...]:
    """Returns the distinct tokens of context and prompt where a repetition penalty counts them, else none."""
    if sampling.adjustments is None or sampling.adjustments.repetition_penalty == 1.0:
        return ()
    context = parts.context_token_ids(held.facts.grid, held.facts.video.frame_timestamps_s)
    return tuple(sorted({*context, *prompt.token_ids}))


def _round_of(asked: Round) -> Attributes:
    if current_log() is None:
        return UNTOLD
    return {names.ROUND: asked.round, names.DRAFT_LENGTH: len(asked.draft_token_ids)}


def _video(held: HeldContext, parts: EngineParts) -> Video:
    if PATCHES not in held.tensors:
        raise FailedPrecondition("this verifier keeps no patches (--keep-patches)", reason="NO_PATCHES")
    facts, video_token_id = held.facts, parts.loaded.family.video_token_id
    token_ids = parts.context_token_ids(facts.grid, facts.video.frame_timestamps_s)
    return Video(
        context=facts.name,
        patches=held.tensors[PATCHES],
        grid=facts.grid,
        second_per_grid=facts.second_per_grid,
        patches_digest=parts.patches_digest,
        text_token_ids=tuple(token_id for token_id in token_ids if token_id != video_token_id),
    )
