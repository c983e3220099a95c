"""One answer on the device: prefill of history and question, the sparse selection, then verification rounds.

    context slab   [0 ................ num_context_tokens)      shared, immutable
    thread slab    [prompt ... ][committed ... ][speculative ]  ours; row i is token num_context_tokens + i

Every method that touches the model runs on the device thread: `open` in turns, `verify` in steps with other answers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from engine.adjusting import Adjuster
from engine.attention import KvView
from engine.batch import Block, Output
from engine.kv_pool import SelectionSlab, Slab, TensorSlab
from engine.pace import Pace, first_rows
from engine.sampling import Sampling
from engine.scheduler import Ask, Steps, Turns
from engine.selection import Reduction, ScoreTap, SelectionMethod, select
from engine.visual_rows import Span, visual_index
from foveate.context_source import FROM_POOL, ContextFetch
from verifier_svc.contexts import HeldContext
from verifier_svc.engine_parts import EngineParts
from verifier_svc.prompt import ThreadPrompt
from verifier_svc.round_guard import Measured, Round, Verified
from verifier_svc.signals import Signals, measure, measure_first, relevance_of
from verifier_svc.threads import Parked

# Slabs are a multiple of this many rows, so that kernels that read in fixed widths stay inside them.
CAPACITY_STEP = 64


@dataclass(frozen=True)
class SelectionPlan:
    """How many visual entries per layer and KV head a sparse drafter will read, and how they are picked."""

    num_selected: int
    method: SelectionMethod


@dataclass(frozen=True)
class Video:
    """What a drafter with another model needs to look at the context's video itself; see `foveate.v1.VideoSource`."""

    context: str
    patches: TensorSlab
    grid: tuple[int, int, int]
    second_per_grid: float
    patches_digest: str
    text_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Opened:
    """Everything a drafter and a gateway need of a sequence; device time in microseconds."""

    sequence_id: str
    context_slab: Slab
    thread_slab: Slab
    selection: SelectionSlab | None
    num_context_tokens: int
    num_prompt_tokens: int
    visual_spans: tuple[Span, ...]
    position_delta: int
    first_token_id: int
    prompt_token_ids: tuple[int, ...]
    prefill_us: int
    video: Video | None = None
    fetch: ContextFetch = FROM_POOL
    is_context_lossy: bool = False
    num_reused_tokens: int = 0
    penalized_token_ids: tuple[int, ...] = ()
    measured: Measured = field(default_factory=Measured)  # of the first token


def thread_capacity(num_rows: int) -> int:
    """Returns the capacity of a slab with room for `num_rows`."""
    return -(-num_rows // CAPACITY_STEP) * CAPACITY_STEP


class Sequence:
    """The device's side of one answer. Holds no memory of its own: its slabs are on the lease of whoever made it."""

    def __init__(
        self,
        parts: EngineParts,
        held: HeldContext,
        *,
        sequence_id: str,
        prompt: ThreadPrompt,
        sampling: Sampling,
        signals: Signals,
        penalized_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`penalized_token_ids` are those of the whole prompt, where the sampling has a repetition penalty."""
        self._runner = parts.runner
        self._pool = parts.pool
        self._relevance = parts.relevance
        self._held = held
        self.sequence_id = sequence_id
        self._prompt = prompt
        self._asking = range(prompt.question_rows.start, len(prompt.token_ids))
        self._sampling = sampling
        self._signals = signals
        self._penalized_token_ids = penalized_token_ids
        self._adjuster: Adjuster | None = None
        if sampling.adjustments is not None:
            self._adjuster = Adjuster(
                sampling.adjustments,
                prompt_token_ids=penalized_token_ids,
                eos_token_ids=parts.runner.eos_token_ids,
            )
        self._thread: Slab | None = None
        self._scores: Tensor | None = None
        self._num_reused = 0
        self._selected: tuple[SelectionSlab, SelectionMethod] | None = None
        self._row_token_ids = list(prompt.token_ids)  # tokens whose KV is in the thread, row by row

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of context, history and question."""
        return self._held.facts.num_tokens + len(self._prompt.token_ids)

    def begin(self, thread: Slab) -> None:
        """Takes the thread slab into use."""
        self._thread = thread

    @torch.inference_mode()
    def copy_rows(self, source: Slab, num_rows: int) -> None:
        """Takes the first rows of another thread on the same context, whose tokens are the prompt's."""
        assert self._thread is not None, "begin comes first"
        for mine, theirs in zip(self._pool.views(self._thread), self._pool.views(source), strict=True):
            mine[:, :, :num_rows].copy_(theirs[:, :, :num_rows])
        self._num_reused = num_rows

    def can_fork(self, origin: Sequence, selection: SelectionSlab | None, method: SelectionMethod) -> bool:
        """Returns whether an open sequence has all that `fork` would compute: same context, prompt and selection."""
        if origin._held is not self._held or origin._prompt.token_ids != self._prompt.token_ids:
            return False
        if selection is None or not selection.num_selected:
            return True
        theirs = origin._selected
        return theirs is not None and (theirs[0].num_selected, theirs[1]) == (selection.num_selected, method)

    @torch.inference_mode()
    def fork(self, origin: Sequence, selection: SelectionSlab | None, method: SelectionMethod) -> int:
        """Takes the prompt's rows but the last, and the selection, from an open sequence; returns the number of rows.

        The last token's own logits are wanted: its row is computed.
        """
        assert origin._thread is not None, "the origin is open"
        num_rows = len(self._prompt.token_ids) - 1
        self.copy_rows(origin._thread, num_rows)
        if selection is not None and selection.num_selected:
            assert origin._selected is not None, "ask can_fork first"
            self._pool.selection_view(selection).copy_(self._pool.selection_view(origin._selected[0]))
            self._selected = selection, method
        return num_rows

    def parked(self) -> Parked:
        """Returns the thread as it can be kept."""
        assert self._thread is not None, "begin comes first"
        num_bytes = self._pool.layout.slab_bytes(self._thread.capacity)
        return Parked(self._held.facts.context_id, tuple(self._row_token_ids), self._thread, num_bytes)

    def open(
        self, selection: SelectionSlab | None, method: SelectionMethod, *, num_reused: int, chunk_tokens: int
    ) -> Turns[Opened]:
        """Prefills the prompt behind its first `num_reused` rows, writes the selection and chooses the first token.

        Rows from the question on score visual entries when the selection needs scores. A piece has at most
        `chunk_tokens`.
        """
        reduction = method.reduction if selection and selection.num_selected and self._selected is None else None
        pace = self._pace(chunk_tokens)
        row, end, output = num_reused, len(self._prompt.token_ids), None
        while row < end:
            turn_s = yield end - row
            num_rows = pace.num_rows(turn_s, end - row)
            with pace.piece(num_rows):
                output = self._prefill(range(row, row + num_rows), reduction)
            row += num_rows
        assert output is not None, "the question's last token is never reused"
        return self._opened(output, selection, method, pace.total_s)

    def _pace(self, chunk_tokens: int) -> Pace:
        num_keys = self._held.facts.num_tokens + len(self._prompt.token_ids)
        return Pace(
            first=first_rows(num_keys),
            most=min(chunk_tokens, self._runner.max_rows or chunk_tokens),
            is_fixed=self._runner.max_rows is None,
        )

    @torch.inference_mode()
    def _prefill(self, rows: range, reduction: Reduction | None) -> Output:
        inside = range(max(rows.start, self._asking.start), rows.stop)
        tap = self._tap(rows.start, inside, reduction) if reduction is not None and inside else None
        (output,) = self._runner.run(
            [
                Block(
                    self._kv(rows.start),
                    self._prompt.token_ids[rows.start : rows.stop],
                    self._position(rows.start),
                    num_chosen=int(rows.stop == len(self._prompt.token_ids)),
                    query_tap=tap,
                )
            ]
        )
        if tap is not None:
            self._scores = tap.scores if self._scores is None else tap.reduction.merge(self._scores, tap.scores)
        return output

    def _opened(
        self, output: Output, selection: SelectionSlab | None, method: SelectionMethod, prefill_s: float
    ) -> Opened:
        assert self._thread is not None, "begin comes first"
        before = time.perf_counter()
        facts = self._held.facts
        if selection is not None and selection.num_selected and self._selected is None:
            self._write_selection(selection, method)
            self._selected = selection, method
        adjusted = self._adjusted(output, len(self._prompt.token_ids))
        (first_token_id,) = output.choose(self.num_prompt_tokens, self._sampling, adjusted)
        measured = measure_first(self._signals, output.logits, first_token_id)
        prefill_s += time.perf_counter() - before
        return Opened(
            sequence_id=self.sequence_id,
            context_slab=self._held.slab,
            thread_slab=self._thread,
            selection=selection,
            num_context_tokens=facts.num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            visual_spans=facts.visual_spans,
            position_delta=facts.position_delta,
            first_token_id=first_token_id,
            prompt_token_ids=self._prompt.token_ids,
            prefill_us=int(prefill_s * 1e6),
            num_reused_tokens=self._num_reused,
            penalized_token_ids=self._penalized_token_ids,
            measured=measured,
        )

    def _adjusted(self, output: Output, num_rows: int, draft_token_ids: tuple[int, ...] = ()) -> Tensor | None:
        """Returns the logits to choose from after the first `num_rows` of the thread; None: as they are."""
        if self._adjuster is None:
            return None
        answer = self._row_token_ids[self._prompt.answer_row : num_rows]
        return self._adjuster.adjusted(output.logits, answer, draft_token_ids)

    def verify(self, asked: Round) -> Steps[Verified]:
        """Runs one admitted round: its rows overwrite whatever speculation left behind base_len."""
        num_drafts = len(asked.draft_token_ids)
        row = asked.base_len - self._held.facts.num_tokens
        token_ids = asked.token_ids + asked.draft_token_ids
        self._row_token_ids[row:] = token_ids
        layer = self._relevance.layer if self._signals.relevance else None
        output = yield Ask(
            self._runner,
            Block(self._kv(row), token_ids, self._position(row), num_chosen=num_drafts + 1, states_layer=layer),
        )
        before = time.perf_counter()
        adjusted = self._adjusted(output, row + len(asked.token_ids), asked.draft_token_ids)
        target_token_ids = tuple(output.choose(asked.base_len + len(asked.token_ids), self._sampling, adjusted))
        measured = measure(
            self._signals,
            logits=output.logits,
            draft_token_ids=asked.draft_token_ids,
            target_token_ids=target_token_ids,
            relevance=self._relevance_of(output.states, num_drafts),
        )
        model_us = int((output.step_s + time.perf_counter() - before) * 1e6)
        return Verified(asked.round, asked.base_len, target_token_ids, model_us, measured)

    @torch.inference_mode()
    def _relevance_of(self, states: Tensor | None, num_drafts: int) -> Tensor | None:
        if states is None:
            return None
        table = self._pool.tensor_view(self._held.tensors[self._relevance.tensor_name])
        return relevance_of(self._relevance, self._signals, states, table, num_drafts=num_drafts)

    def _kv(self, row: int) -> KvView:
        """Returns the context and the first `row` rows of the thread."""
        context, thread = self._views
        return KvView(context, thread, row)

    @cached_property
    def _views(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        assert self._thread is not None, "begin comes first"
        return self._pool.views(self._held.slab), self._pool.views(self._thread)

    def _position(self, row: int) -> int:
        """Returns the RoPE position of thread row `row`; later rows' are consecutive."""
        facts = self._held.facts
        return facts.num_tokens + row + facts.position_delta

    def _tap(self, first_row: int, scoring: range, reduction: Reduction) -> ScoreTap:
        """Returns the tap of a forward that starts at `first_row` of the thread, of which rows `scoring` vote."""
        kv = self._kv(first_row)
        assert kv.context is not None, "a sequence stands on a context"
        keys = kv.context[0]
        return ScoreTap(
            keys,
            kv.thread[0],
            first_row,
            visual_index=self._visual_index,
            rows=slice(scoring.start - first_row, scoring.stop - first_row),
            scaling=self._runner.scaling,
            reduction=reduction,
        )

    @cached_property
    def _visual_index(self) -> Tensor:
        return visual_index(self._held.facts.visual_spans, self._views[0][0].device)

    @torch.inference_mode()
    def _write_selection(self, selection: SelectionSlab, method: SelectionMethod) -> None:
        view = self._pool.selection_view(selection)
        picked = select(
            method,
            self._scores,
            visual_index=self._visual_index,
            num_selected=selection.num_selected,
            layout=self._pool.layout,
            generator=torch.Generator().manual_seed(self._sampling.seed & 0x7FFFFFFFFFFFFFFF),
        )
        view.copy_(picked)
