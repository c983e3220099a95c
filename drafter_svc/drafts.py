"""Values of the drafting rounds, and which rounds follow from the last.

rows of the sequence     [0 ........ base_len)[token_ids)[drafts)
whose KV it is           the verifier's        the drafter's own, approximate: replaced as soon as they are committed
base_len of the next     base_len + len(token_ids), up to len(drafts) more: what the verifier accepted
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_handle import PoolHandle, SelectionSlab, Slab
from engine.sampling import Sampling
from foveate.rpc.errors import FailedPrecondition, FieldViolation, InvalidArgument


@dataclass(frozen=True)
class SequenceSpec:
    """A verifier's sequence, as `open` describes it. Spans are (start, num_tokens) of visual tokens in the context."""

    sequence_id: str
    handle: PoolHandle
    context: Slab
    thread: Slab
    selection: SelectionSlab
    num_context_tokens: int
    num_prompt_tokens: int
    visual_spans: tuple[tuple[int, int], ...]
    position_delta: int
    sampling: Sampling
    max_tokens: int

    @property
    def max_len(self) -> int:
        """Tokens the sequence can ever have: where its slab or its answer ends."""
        return min(self.num_context_tokens + self.thread.capacity, self.num_prompt_tokens + self.max_tokens)


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
    """Compare-and-set on the length of one sequence."""

    def __init__(self, spec: SequenceSpec, *, max_draft_tokens: int, vocab_size: int) -> None:
        self._spec = spec
        self._max_draft_tokens = max_draft_tokens
        self._vocab_size = vocab_size
        self._legal_base_lens = range(spec.num_prompt_tokens, spec.num_prompt_tokens + 1)
        self._last: tuple[Round, Draft] | None = None

    def admit(self, asked: Round) -> Draft | None:
        """Returns the earlier draft of a repeated round, None when the round may run.

        FAILED_PRECONDITION (BASE_LEN_MISMATCH) for a round that does not follow from the last; INVALID_ARGUMENT for
        content that no round may have.
        """
        self._validate(asked)
        if self._last is not None and asked == self._last[0]:
            return self._last[1]
        expected = 1 if self._last is None else self._last[0].round + 1
        legal = self._legal_base_lens
        if asked.round != expected or asked.base_len not in legal:
            raise FailedPrecondition(
                f"round {asked.round} with base_len {asked.base_len} does not follow: expected is round {expected} "
                f"with base_len {legal.start} to {legal.stop - 1}",
                reason="BASE_LEN_MISMATCH",
                metadata={"expected_round": str(expected), "min_base_len": str(legal.start)},
            )
        return None

    def record(self, asked: Round, draft: Draft) -> None:
        """Notes a round that ran."""
        self._last = asked, draft
        known = asked.base_len + len(asked.token_ids)
        self._legal_base_lens = range(known, known + len(draft.draft_token_ids) + 1)

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
