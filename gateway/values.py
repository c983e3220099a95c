"""What moves through the gateway: frozen values, without protobuf and without tensors.

Numbers of enumerations are those of `foveate.v1`, so that the codec is a cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Role(IntEnum):
    """Who said a turn."""

    USER = 1
    ASSISTANT = 2


class DraftMode(IntEnum):
    """Where drafts come from; DEFAULT lets the gateway choose."""

    DEFAULT = 0
    OFF = 1
    SPARSE = 2
    NGRAM = 3


class SelectionMethod(IntEnum):
    """How the sparse drafter's visual entries are picked."""

    DEFAULT = 0
    ATTENTION = 1
    RANDOM = 2
    RECENT = 3


class Origin(IntEnum):
    """Where a token came from; the words are explained in `gateway.rounds`."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
    PLAIN = 4


class FinishReason(IntEnum):
    """Why an answer ended."""

    EOS = 1
    LENGTH = 2
    STOP = 3


class Guarantee(IntEnum):
    """What is promised about an answer's tokens."""

    LOSSLESS = 1
    LOOSE = 2


@dataclass(frozen=True)
class Turn:
    """An earlier turn of the conversation."""

    role: Role
    text: str


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy. `seed` is always set when temperature is above 0."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class Drafting:
    """How an answer is drafted; never changes its tokens under an exact policy."""

    mode: DraftMode = DraftMode.DEFAULT
    num_draft_tokens: int = 5
    visual_budget: float = 0.05
    selection: SelectionMethod = SelectionMethod.DEFAULT


@dataclass(frozen=True)
class Question:
    """A valid question about a context, with every default filled in."""

    context: str
    text: str
    history: tuple[Turn, ...] = ()
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    drafting: Drafting = Drafting()


@dataclass(frozen=True)
class VisualSpan:
    """A half-open run of the context that holds visual tokens."""

    start: int
    num_tokens: int


@dataclass(frozen=True)
class OpenedSequence:
    """A sequence the verifier holds: the KV of its `num_prompt_tokens` rows is in the pool, the first token's is not.

    `kv` is the serialized description of the KV (handle, slabs, selection); the gateway only hands it to the drafter.
    `room` is the number of rows left for the answer.
    """

    sequence_id: str
    num_context_tokens: int
    num_prompt_tokens: int
    prompt_token_ids: tuple[int, ...]
    first_token_id: int
    room: int
    prefill_us: int
    kv: bytes = b""


@dataclass(frozen=True)
class Head:
    """Where a sequence stands before a round: `base_len` rows of KV stay, `token_ids` follow them and have none yet.

    `committed_ids` are all tokens that the last round committed (before round 1, the first token); `token_ids` is their
    tail.
    """

    round: int
    base_len: int
    token_ids: tuple[int, ...]
    committed_ids: tuple[int, ...]


@dataclass(frozen=True)
class Draft:
    """Token ids proposed to follow a head, and the device time it took."""

    token_ids: tuple[int, ...] = ()
    model_us: int = 0


@dataclass(frozen=True)
class Verified:
    """The target's own choices: one in place of each draft token and one after the last."""

    target_token_ids: tuple[int, ...]
    model_us: int = 0


@dataclass(frozen=True)
class Token:
    """A committed token."""

    id: int
    origin: Origin


@dataclass(frozen=True)
class TextToken:
    """A token that is sent, with the text it added (empty inside a character)."""

    id: int
    origin: Origin
    text: str


@dataclass(frozen=True)
class Started:
    """Event: the prompt is prefilled and the first token is known."""

    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Delta:
    """Event: more of the answer. The text of a delta is exactly the text of its tokens."""

    tokens: tuple[TextToken, ...]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True)
class AnswerStats:
    """Counts and times of one answer; see `gateway.statistics` for what adds up to what."""

    draft_mode: DraftMode
    num_rounds: int
    num_draft_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_loose_tokens: int
    time_to_first_token_ms: float
    prefill_ms: float
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    decode_ms: float
    round_overhead_ms: tuple[float, ...]


@dataclass(frozen=True)
class Finished:
    """Event: the end of an answer."""

    finish_reason: FinishReason
    guarantee: Guarantee
    num_prompt_tokens: int
    num_output_tokens: int
    stats: AnswerStats
    seed: int | None
    notes: tuple[str, ...]


Event = Started | Delta | Finished
