"""What moves through the gateway: frozen values, without protobuf and without tensors.

Numbers of enumerations are those of `foveate.v1`, so that the codec is a cast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from foveate.context_source import FROM_POOL, ContextFetch

MAX_DRAFT_TOKENS = 16  # per round, that a request may ask for


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
    STREAMING = 4
    LAYERSKIP = 5
    SMALL = 6


# Drafts that a drafter service makes.
SERVICE_MODES = (DraftMode.SPARSE, DraftMode.STREAMING, DraftMode.LAYERSKIP, DraftMode.SMALL)


class SelectionMethod(IntEnum):
    """How a drafter's visual entries are picked."""

    DEFAULT = 0
    ATTENTION = 1
    RANDOM = 2
    RECENT = 3
    TWO_STAGE = 4
    UNIFORM = 5


class AcceptancePolicy(IntEnum):
    """Which draft tokens an answer keeps."""

    EXACT = 1
    LVSPEC = 2
    FLY = 3
    FLY_GATE = 4
    RANDOM = 5


class RelevancePool(IntEnum):
    """Among which draft tokens LVSpec counts the relevant share."""

    PER_ROUND = 1
    RUNNING = 2
    THRESHOLD = 3


class FlyVariant(IntEnum):
    """How FLy counts its window."""

    CODE = 1
    PAPER = 2


class Origin(IntEnum):
    """Where a token came from; the words are explained in `gateway.rounds`."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
    PLAIN = 4
    LOOSE = 5
    SALVAGED = 6


class FinishReason(IntEnum):
    """Why an answer ended."""

    EOS = 1
    LENGTH = 2
    STOP = 3


class Guarantee(IntEnum):
    """What is promised about an answer's tokens."""

    LOSSLESS = 1
    LOOSE = 2
    LOSSY_CONTEXT = 3


@dataclass(frozen=True)
class Turn:
    """An earlier turn of the conversation, and the ids it was generated as where the server kept them."""

    role: Role
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy. `seed` is always set when temperature is above 0.

    `logit_bias` is (token id, bias), each token once.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True)
class Drafting:
    """How an answer is drafted; never changes its tokens under an exact policy. No budget: the mode's default.

    `num_draft_tokens` is the length of every draft or, with `max_draft_tokens`, that of the first one.
    """

    mode: DraftMode = DraftMode.DEFAULT
    num_draft_tokens: int = 5
    max_draft_tokens: int | None = None
    visual_budget: float | None = None
    selection: SelectionMethod = SelectionMethod.DEFAULT


@dataclass(frozen=True)
class Acceptance:
    """What an answer keeps of its drafts; parameters that `policy` does not have are as they are here."""

    policy: AcceptancePolicy = AcceptancePolicy.EXACT
    lam: float = 0.7
    num_nearest: int | None = None
    window: int = 3
    pool: RelevancePool = RelevancePool.PER_ROUND
    threshold: float = 0.0
    entropy_threshold: float = 0.3
    variant: FlyVariant = FlyVariant.CODE
    guard_special: bool = True
    guard_numbers: bool = True
    guard_negations: bool = True
    max_loose_run: int = 0
    min_probability: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Signals:
    """What the verifier measures at every place, beside its choice; `num_nearest` None is the model's own."""

    relevance: bool = False
    num_nearest: int | None = None
    entropy: bool = False
    log_probabilities: bool = False
    num_top: int = 0

    def with_all(self, *, has_relevance: bool) -> Signals:
        """Returns everything that tells of a token; relevance only where the verifier keeps visual states."""
        return Signals(has_relevance, self.num_nearest, entropy=True, log_probabilities=True)

    def with_logprobs(self, num_top: int) -> Signals:
        """Returns these and log-probabilities, of `num_top` likeliest tokens too."""
        return replace(self, log_probabilities=True, num_top=num_top)


@dataclass(frozen=True)
class Question:
    """A valid question about a context, with every default filled in.

    `answer_token_ids` are an answer's tokens that are committed already, when it goes on after a verifier was lost.
    `keep_thread` asks the verifier to keep the KV for a next turn. `num_top_logprobs` is None where none
    are sent. `num_answers` are asked for in all (`gateway.samples`); `fork_of` is the sequence of one of the others.
    """

    context: str
    text: str
    history: tuple[Turn, ...] = ()
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    drafting: Drafting = Drafting()
    acceptance: Acceptance = Acceptance()
    signals: Signals = Signals()
    tenant: str = ""
    answer_token_ids: tuple[int, ...] = ()
    keep_thread: bool = False
    num_top_logprobs: int | None = None
    ignore_eos: bool = False
    num_answers: int = 1
    fork_of: str = ""


@dataclass(frozen=True)
class VisualSpan:
    """A half-open run of the context that holds visual tokens."""

    start: int
    num_tokens: int


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens at a place, the likeliest first."""

    token_ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Place:
    """What is known about the place of a committed token: what was measured there, and the token it stands against.

    `target_token_id` is set where the verifier chose another token, `draft_token_id` where another was drafted.
    """

    round: int = 0
    relevance: float | None = None
    entropy: float | None = None
    log_probability: float | None = None
    target_token_id: int | None = None
    draft_token_id: int | None = None
    top: TopTokens | None = None


@dataclass(frozen=True)
class OpenedSequence:
    """A sequence the verifier holds: the KV of its `num_prompt_tokens` rows is in the pool, the first token's is not.

    `kv` is the serialized description of the KV (handle, slabs, selection); the gateway only hands it to the drafter.
    `kv_namespace` names the /dev/shm it lies in; empty on a GPU.
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
    kv_namespace: str = ""
    fetch: ContextFetch = FROM_POOL
    num_reused_tokens: int = 0
    is_context_lossy: bool = False
    first_place: Place = Place()


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
class Measured:
    """What was measured at each place of the target's choices, or nothing; one fewer of draft tokens."""

    relevance: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()
    draft_log_probabilities: tuple[float, ...] = ()
    target_log_probabilities: tuple[float, ...] = ()
    top: tuple[TopTokens, ...] = ()


@dataclass(frozen=True)
class Verified:
    """The target's own choices: one in place of each draft token and one after the last."""

    target_token_ids: tuple[int, ...]
    model_us: int = 0
    measured: Measured = Measured()


@dataclass(frozen=True)
class Token:
    """A committed token."""

    id: int
    origin: Origin
    place: Place = Place()


@dataclass(frozen=True)
class TextToken:
    """A token that is sent, with the text it added (empty inside a character)."""

    id: int
    origin: Origin
    text: str
    place: Place = Place()


@dataclass(frozen=True)
class Started:
    """Event: the prompt is prefilled and the first token is known."""

    num_prompt_tokens: int
    num_cached_tokens: int
    fetch: ContextFetch = FROM_POOL


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
    num_salvaged_tokens: int
    time_to_first_token_ms: float
    prefill_ms: float
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    decode_ms: float
    round_overhead_ms: tuple[float, ...]
    num_rounds_per_draft_length: tuple[int, ...] = ()


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
    policy: AcceptancePolicy
    loose_positions: tuple[int, ...]
    num_conversation_turns: int = 0


Event = Started | Delta | Finished
