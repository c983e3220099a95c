"""A Verify stream's life: open once, then rounds, then everything freed, however it ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from engine.device_thread import DeviceThread
from engine.kv_pool import SelectionSlab
from engine.sampling import Sampling
from engine.selection import SelectionMethod
from foveate.rpc.errors import FailedPrecondition, ResourceExhausted
from verifier_svc.config import VerifierConfig
from verifier_svc.contexts import ContextStore, HeldContext
from verifier_svc.engine_parts import EngineParts
from verifier_svc.memory import Memory, SlabLease
from verifier_svc.prompt import ThreadPrompt, Turn
from verifier_svc.round_guard import Round, RoundGuard, Verified
from verifier_svc.sequences import Opened, Sequence, thread_capacity


@dataclass(frozen=True)
class OpenRequest:
    """What a gateway asks for; exactly one of `num_selected` and `visual_budget` is set when a selection is wanted."""

    context_id: str
    history: tuple[Turn, ...]
    question: str
    sampling: Sampling
    max_tokens: int
    num_selected: int | None
    visual_budget: float | None
    selection: SelectionMethod

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
        device: DeviceThread,
        contexts: ContextStore,
        memory: Memory,
        on_idle: Callable[[], None],
    ) -> None:
        self.parts = parts
        self.config = config
        self.device = device
        self.contexts = contexts
        self.memory = memory
        self._on_idle = on_idle
        self._ids = itertools.count(1)
        self.num_open = 0

    def opened(self) -> str:
        """Counts a session that opens; returns an id unique in the pool's life."""
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
        self._held: HeldContext | None = None
        self._sequence: Sequence | None = None
        self._guard: RoundGuard | None = None

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A step of this sequence may be running: the lease is freed behind it in the device's queue.
        self._sessions.device.submit(self._lease.free_all)
        if self._held is not None:
            self._sessions.contexts.give_back(self._held)
            self._held = None
            self._sessions.closed()

    async def open(self, asked: OpenRequest) -> Opened:
        """Prefills history and question. NOT_FOUND without the context, RESOURCE_EXHAUSTED without room."""
        if self._held is not None:
            raise FailedPrecondition("the sequence is open already", reason="SEQUENCE_ALREADY_OPEN")
        self._held = held = self._sessions.contexts.acquire(asked.context_id)
        sequence_id = self._sessions.opened()
        parts = self._sessions.parts
        prompt = await asyncio.to_thread(parts.prompts.thread, asked.history, asked.question)
        room = self._room(prompt, asked.max_tokens)
        sequence = Sequence(parts, held, sequence_id=sequence_id, prompt=prompt, sampling=asked.sampling)
        opened = await self._prefill(sequence, prompt, room, asked)
        self._sequence = sequence
        self._guard = RoundGuard(
            sequence_id=sequence_id,
            num_prompt_tokens=opened.num_prompt_tokens,
            max_len=opened.num_prompt_tokens + room + self._sessions.config.max_draft_tokens,
            max_draft_tokens=self._sessions.config.max_draft_tokens,
            vocab_size=parts.vocab_size,
        )
        return opened

    async def verify(self, asked: Round) -> Verified:
        """Runs a round, or repeats the reply of the round that was run last."""
        if self._guard is None or self._sequence is None:
            raise FailedPrecondition("open the sequence first", reason="SEQUENCE_NOT_OPEN")
        repeated = self._guard.admit(asked)
        if repeated is not None:
            return repeated
        reply = await self._sessions.device.run(self._sequence.verify, asked)
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
        wants_scores = bool(selection and selection.num_selected and asked.selection is SelectionMethod.ATTENTION)
        step = sessions.config.prefill_chunk_tokens
        for start in range(0, len(prompt.token_ids), step):
            rows = range(start, min(start + step, len(prompt.token_ids)))
            await sessions.device.run(sequence.prefill_chunk, rows, with_scores=wants_scores)
        return await sessions.device.run(sequence.finish_opening, selection, asked.selection)

    async def _take_selection(self, num_selected: int | None) -> SelectionSlab | None:
        if not num_selected:  # an empty selection takes no memory
            return None if num_selected is None else SelectionSlab(0, 0)
        return await self._sessions.memory.take_selection(self._lease, num_selected)
