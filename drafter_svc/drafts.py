"""Values of the drafting rounds, and which may run (engine/round_order.py draws the lengths).

Where the verifier's KV is shared, that of the tokens up to base_len is the verifier's; that of token_ids and drafts is
the drafter's own, approximate, and replaced as soon as they are committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.kv_handle import PoolHandle, SelectionSlab, Slab, TensorSlab
from engine.round_order import RoundOrder
from engine.sampling import Sampling
from foveate.rpc.errors import FieldViolation, InvalidArgument


class DraftKind(StrEnum):
    """What drafts come from."""

    SPARSE = "sparse"
    STREAMING = "streaming"
    LAYERSKIP = "layerskip"
    SMALL = "small"


@dataclass(frozen=True)
class VideoSource:
    """What another model needs to look at the context's video itself.

    `patches` [num_patches, patch_width] are the video after resizing and normalising; `grid` is (time, rows, columns)
    in patches before merging. `text_token_ids` are the context's tokens that are not visual, `prompt_token_ids` those
    of the thread's prompt.
    """

    context: str
    patches: TensorSlab
    grid: tuple[int, int, int]
    second_per_grid: float
    patches_digest: str
    text_token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SequenceSpec:
    """A verifier's sequence, as `open` describes it. Spans are (start, num_tokens) of visual tokens in the context.

    SPARSE and SMALL have a selection, STREAMING uses `visual_budget`, SMALL has the video.
    """

    kind: DraftKind
    sequence_id: str
    handle: PoolHandle
    context: Slab
    thread: Slab
    selection: SelectionSlab | None
    visual_budget: float
    video: VideoSource | None
    num_context_tokens: int
    num_prompt_tokens: int
    visual_spans: tuple[tuple[int, int], ...]
    position_delta: int
    sampling: Sampling
    max_tokens: int
    penalized_token_ids: tuple[int, ...] = ()

    @property
    def max_len(self) -> int:
        """Tokens the sequence can ever have: where its slab or its answer ends."""
        return min(self.num_context_tokens + self.thread.capacity, self.num_prompt_tokens + self.max_tokens)

    def num_wanted(self, asked: Round) -> int:
        """Returns how many tokens to propose: what was asked for, or what the sequence has room for."""
        return min(asked.num_draft_tokens, self.max_len - asked.base_len - len(asked.token_ids))


@dataclass(frozen=True)
class Round:
    """Asks for a draft after `token_ids`, which follow the first `base_len` tokens."""

    sequence_id: str
    round: int
    base_len: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int


@dataclass(frozen=True)
class Draft:
    """What was proposed. Device time in microseconds."""

    round: int
    base_len: int
    draft_token_ids: tuple[int, ...]
    model_us: int


class DraftGuard:
    """Admits the rounds of one sequence; ids must be below `vocab_size`."""

    def __init__(self, spec: SequenceSpec, *, max_draft_tokens: int, vocab_size: int) -> None:
        self._spec = spec
        self._max_draft_tokens = max_draft_tokens
        self._vocab_size = vocab_size
        self._order: RoundOrder[Round, Draft] = RoundOrder(spec.num_prompt_tokens)

    def admit(self, asked: Round) -> Draft | None:
        """Returns the earlier draft of a repeated round, None when the round may run.

        Raises InvalidArgument for content that no round may have, FailedPrecondition for a round that does not follow.
        """
        self._validate(asked)
        return self._order.admit(asked)

    def record(self, asked: Round, draft: Draft) -> None:
        """Notes a round that ran."""
        self._order.record(asked, draft, num_draft_tokens=len(draft.draft_token_ids))

    def _validate(self, asked: Round) -> None:
        violations = []
        if asked.sequence_id != self._spec.sequence_id:
            violations.append(FieldViolation("round.sequence_id", "is not the one this stream opened"))
        if not asked.token_ids:
            violations.append(FieldViolation("round.token_ids", "must hold at least one token"))
        if any(token_id >= self._vocab_size for token_id in asked.token_ids):
            violations.append(FieldViolation("round.token_ids", f"ids must be below {self._vocab_size}"))
        if not 0 <= asked.num_draft_tokens <= self._max_draft_tokens:
            violations.append(FieldViolation("round.num_draft_tokens", f"must be at most {self._max_draft_tokens}"))
        end = asked.base_len + len(asked.token_ids)
        if end > self._spec.num_context_tokens + self._spec.thread.capacity:
            violations.append(FieldViolation("round.base_len", f"the sequence has no room for {end} tokens"))
        if violations:
            raise InvalidArgument("the round is not valid", violations=violations)
