"""One answer on the device: prefill of history and question, the sparse selection, then verification rounds.

    context slab   [0 ................ num_context_tokens)      shared, immutable
    thread slab    [prompt ... ][committed ... ][speculative ]  ours; row i is token num_context_tokens + i

Every method that touches the model runs on the device thread, one step at a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import KvView
from engine.kv_pool import SelectionSlab, Slab
from engine.positions import text_positions
from engine.sampling import Sampling, choose
from engine.selection import ScoreTap, SelectionMethod, select
from verifier_svc.contexts import HeldContext
from verifier_svc.engine_parts import EngineParts
from verifier_svc.prompt import ThreadPrompt
from verifier_svc.round_guard import Round, Verified

# Slabs are a multiple of this many rows, so that kernels that read in fixed widths stay inside them.
CAPACITY_STEP = 64


@dataclass(frozen=True)
class SelectionPlan:
    """How many visual entries per layer and KV head a sparse drafter will read, and how they are picked."""

    num_selected: int
    method: SelectionMethod


@dataclass(frozen=True)
class Opened:
    """Everything a drafter and a gateway need of a sequence; device time in microseconds."""

    sequence_id: str
    context_slab: Slab
    thread_slab: Slab
    selection: SelectionSlab | None
    num_context_tokens: int
    num_prompt_tokens: int
    visual_span: tuple[int, int]  # start, number of tokens
    position_delta: int
    first_token_id: int
    prompt_token_ids: tuple[int, ...]
    prefill_us: int


def thread_capacity(num_rows: int) -> int:
    """Returns the capacity of a slab with room for `num_rows`."""
    return -(-num_rows // CAPACITY_STEP) * CAPACITY_STEP


class Sequence:
    """The device's side of one answer. Holds no memory of its own: its slabs are on the lease of whoever made it."""

    def __init__(
        self, parts: EngineParts, held: HeldContext, *, sequence_id: str, prompt: ThreadPrompt, sampling: Sampling
    ) -> None:
        self._runner = parts.runner
        self._pool = parts.pool
        self._held = held
        self._sequence_id = sequence_id
        self._prompt = prompt
        self._asking = range(prompt.question_rows.start, len(prompt.token_ids))
        self._sampling = sampling
        self._thread: Slab | None = None
        self._scores: Tensor | None = None
        self._last_hidden: Tensor | None = None
        self._prefill_s = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of context, history and question."""
        return self._held.facts.num_tokens + len(self._prompt.token_ids)

    def begin(self, thread: Slab) -> None:
        """Takes the thread slab into use."""
        self._thread = thread

    def prefill_chunk(self, rows: range, *, with_scores: bool) -> None:
        """Prefills rows of the thread's prompt; with scores, those from the question on vote for visual entries."""
        before = time.perf_counter()
        inside = range(max(rows.start, self._asking.start), rows.stop)
        tap = self._tap(rows.start, inside) if with_scores and inside else None
        token_ids = self._prompt.token_ids[rows.start : rows.stop]
        positions, kv = self._positions(rows.start, len(rows)), self._kv(rows.start)
        hidden = self._runner.forward(token_ids=token_ids, positions=positions, kv=kv, query_tap=tap)
        if tap is not None:
            self._scores = tap.scores if self._scores is None else torch.maximum(self._scores, tap.scores)
        self._last_hidden = hidden[-1:]
        self._prefill_s += time.perf_counter() - before

    def finish_opening(self, selection: SelectionSlab | None, method: SelectionMethod) -> Opened:
        """Chooses the first token and writes the selection, when one is wanted."""
        assert self._thread is not None, "begin comes first"
        assert self._last_hidden is not None, "prefill comes before"
        before = time.perf_counter()
        facts = self._held.facts
        if selection is not None and selection.num_selected:
            self._write_selection(selection, method)
        logits = self._runner.logits(self._last_hidden)
        (first_token_id,) = choose(logits, self.num_prompt_tokens, self._sampling)
        self._prefill_s += time.perf_counter() - before
        return Opened(
            sequence_id=self._sequence_id,
            context_slab=self._held.slab,
            thread_slab=self._thread,
            selection=selection,
            num_context_tokens=facts.num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            visual_span=(facts.visual_start, facts.num_visual_tokens),
            position_delta=facts.position_delta,
            first_token_id=first_token_id,
            prompt_token_ids=self._prompt.token_ids,
            prefill_us=int(self._prefill_s * 1e6),
        )

    def verify(self, asked: Round) -> Verified:
        """Runs one admitted round: its rows overwrite whatever speculation left behind base_len."""
        before = time.perf_counter()
        num_drafts = len(asked.draft_token_ids)
        row = asked.base_len - self._held.facts.num_tokens
        token_ids = asked.token_ids + asked.draft_token_ids
        hidden = self._runner.step(
            token_ids=token_ids, positions=self._positions(row, len(token_ids)), kv=self._kv(row)
        )
        logits = self._runner.logits(hidden[-(num_drafts + 1) :])  # [num_drafts + 1, vocab]
        target_token_ids = choose(logits, asked.base_len + len(asked.token_ids), self._sampling)
        model_us = int((time.perf_counter() - before) * 1e6)
        return Verified(asked.round, asked.base_len, tuple(target_token_ids), model_us)

    def _kv(self, row: int) -> KvView:
        """Returns the context and the first `row` rows of the thread."""
        assert self._thread is not None, "begin comes first"
        return KvView(self._pool.views(self._held.slab), self._pool.views(self._thread), row)

    def _positions(self, row: int, num_tokens: int) -> Tensor:
        """Returns the RoPE positions of tokens that start at thread row `row`."""
        facts = self._held.facts
        return text_positions(facts.num_tokens + row + facts.position_delta, num_tokens)

    def _tap(self, first_row: int, scoring: range) -> ScoreTap:
        """Returns the tap of a forward that starts at `first_row` of the thread, of which rows `scoring` vote."""
        kv = self._kv(first_row)
        assert kv.context is not None, "a sequence stands on a context"
        keys = kv.context[0]
        return ScoreTap(
            keys,
            kv.thread[0],
            first_row,
            visual_index=self._visual_index(keys.device),
            rows=slice(scoring.start - first_row, scoring.stop - first_row),
            scaling=self._runner.scaling,
        )

    def _visual_index(self, device: torch.device) -> Tensor:
        facts = self._held.facts
        return torch.arange(facts.visual_start, facts.visual_start + facts.num_visual_tokens, device=device)

    @torch.inference_mode()
    def _write_selection(self, selection: SelectionSlab, method: SelectionMethod) -> None:
        view = self._pool.selection_view(selection)
        picked = select(
            method,
            self._scores,
            visual_index=self._visual_index(view.device),
            num_selected=selection.num_selected,
            layout=self._pool.layout,
            generator=torch.Generator().manual_seed(self._sampling.seed & 0x7FFFFFFFFFFFFFFF),
        )
        view.copy_(picked)
