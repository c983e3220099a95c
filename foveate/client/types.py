"""What the client takes and returns, as frozen values; field meanings are those of protos/foveate/v1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypedDict

from foveate.context_source import ContextFetch
from foveate.video import ContextTimings, VideoFacts


class Stage(StrEnum):
    """A stage of making a context, in order; units are bytes, frames, frames and tokens."""

    UPLOAD = "upload"
    DECODE = "decode"
    ENCODE = "encode"
    PREFILL = "prefill"


class DraftMode(StrEnum):
    """Where drafts come from; none of them changes the answer under an exact policy."""

    OFF = "off"
    SPARSE = "sparse"
    NGRAM = "ngram"
    STREAMING = "streaming"
    LAYERSKIP = "layerskip"
    SMALL = "small"


class Selection(StrEnum):
    """How a drafter's visual entries are picked."""

    ATTENTION = "attention"
    RANDOM = "random"
    RECENT = "recent"
    TWO_STAGE = "two-stage"
    UNIFORM = "uniform"


class Policy(StrEnum):
    """Which draft tokens an answer keeps; all but `EXACT` can change it."""

    EXACT = "exact"
    LVSPEC = "lvspec"
    FLY = "fly"
    FLY_GATE = "fly-gate"
    RANDOM = "random"


class Pool(StrEnum):
    """Among which draft tokens LVSpec counts the relevant share."""

    PER_ROUND = "per-round"
    RUNNING = "running"
    THRESHOLD = "threshold"


class FlyVariant(StrEnum):
    """How FLy counts its window."""

    CODE = "code"
    PAPER = "paper"


class Origin(StrEnum):
    """Where a token came from.

    A draft that the verifier would have chosen (ACCEPTED), or kept against its choice (LOOSE, SALVAGED: only shifted);
    or the verifier: for a rejected draft, after a full one, without one.
    """

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    PLAIN = "plain"
    LOOSE = "loose"
    SALVAGED = "salvaged"


class FinishReason(StrEnum):
    """Why an answer ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"


class Guarantee(StrEnum):
    """What holds for an answer's tokens against plain decoding."""

    LOSSLESS = "lossless"
    LOOSE = "loose"
    LOSSY_CONTEXT = "lossy context"


class Role(StrEnum):
    """Who said a turn."""

    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Progress:
    """How far a stage is; `total` is 0 when unknown."""

    stage: Stage
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]


class ContextState(StrEnum):
    """Where a context is in its life: in a verifier's memory, or in the cold tier only."""

    READY = "ready"
    COLD = "cold"


@dataclass(frozen=True)
class Context:
    """A prefilled video; `reused` when creating it found it already there.

    `tiers` has the bytes held in each tier; `expire_time` is None when it is pinned; `fetch` says how it was come by.
    `lossy` when its keys and values came back from the cold tier in eight bits.
    """

    name: str
    video: VideoFacts
    num_visual_tokens: int
    num_tokens: int
    kv_bytes: int
    create_time: datetime
    reused: bool
    timings: ContextTimings
    state: ContextState = ContextState.READY
    expire_time: datetime | None = None
    tiers: Mapping[str, int] = field(default_factory=dict)
    num_hits: int = 0
    pinned: bool = False
    fetch: ContextFetch | None = None
    media_sha256: str = ""
    lossy: bool = False


@dataclass(frozen=True)
class Turn:
    """An earlier turn of a conversation."""

    role: Role
    text: str


@dataclass(frozen=True)
class Acceptance:
    """What an answer keeps of its drafts; whatever is None is the server's default.

    Parameters that `policy` does not have must stay None. `lam` is LVSpec's lambda, the share of draft tokens that need
    not match; `window` is how far a strict one may be shifted, or the length of FLy's window.
    """

    policy: Policy | None = None
    lam: float | None = None
    num_nearest: int | None = None
    window: int | None = None
    pool: Pool | None = None
    threshold: float | None = None
    entropy_threshold: float | None = None
    variant: FlyVariant | None = None
    guard_special: bool | None = None
    guard_numbers: bool | None = None
    guard_negations: bool | None = None
    max_loose_run: int | None = None
    min_probability: float | None = None
    seed: int | None = None


class AskOptions(TypedDict, total=False):
    """Options of a question; whatever is absent or None is the server's default.

    `history` are earlier turns, oldest first, ending with the model's (see `Answer.turns`).
    `visual_budget` is the share of visual tokens that the drafter keeps, 0 to 1.
    `explain` asks for the origin and the text of every token, and for what the policy knew about it.
    `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias` (by token id) and `min_tokens` change
    what is chosen. `logprobs` asks for log-probabilities, `top_logprobs` for those of so many likeliest tokens too.
    `ignore_eos` goes on to `max_tokens`. `n` answers come in one stream (`Client.ask_n`), with seeds `seed`, `seed` + 1
    and so on.
    `conversation` is an id of yours under which the server keeps the turns, so that no history has to be sent;
    `keep_turns` forgets the later ones first, `branch_of` begins with the turns of another conversation.
    `timeout_s` bounds the whole call; when it passes: DeadlineExceeded.
    """

    history: Sequence[Turn]
    max_tokens: int | None
    stop: Sequence[str]
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    min_tokens: int | None
    logprobs: bool
    top_logprobs: int | None
    ignore_eos: bool
    n: int | None
    draft: DraftMode | None
    num_draft_tokens: int | None
    visual_budget: float | None
    selection: Selection | None
    acceptance: Acceptance | None
    explain: bool
    conversation: str | None
    keep_turns: int | None
    branch_of: str | None
    timeout_s: float | None


@dataclass(frozen=True)
class TokenDetail:
    """What is known about a token of an answer; None is not measured, or not so.

    `target_token_id` is what the verifier would have chosen, where it is another; `draft_token_id` what was drafted and
    rejected. Their texts are those of the tokens on their own.
    """

    round: int
    relevance: float | None
    entropy: float | None
    log_probability: float | None
    target_token_id: int | None
    target_text: str
    draft_token_id: int | None
    draft_text: str


@dataclass(frozen=True)
class TopLogprob:
    """One of the likeliest tokens at a place, with its text on its own."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of a token, before bias, penalties and sampling; `top` has the likeliest ones' there."""

    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True)
class Delta:
    """More of an answer: append `text`. The rest goes with `token_ids`, one each, if it was asked for.

    `explain` asks for all but `logprobs`. `index` tells which of n answers it belongs to.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...] = ()
    token_texts: tuple[str, ...] = ()
    details: tuple[TokenDetail, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0


@dataclass(frozen=True)
class AnswerStats:
    """Counts and times of one answer; accepted tokens never count the recovered or bonus token."""

    draft_mode: DraftMode | None
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

    @property
    def accepted_per_round(self) -> float | None:
        """T: accepted draft tokens per round that had a draft; None when no round had one."""
        return self.num_accepted_tokens / self.num_draft_rounds if self.num_draft_rounds else None


@dataclass(frozen=True)
class Answer:
    """A whole answer with what the server says about it."""

    context: str
    question: str
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    token_texts: tuple[str, ...]
    details: tuple[TokenDetail, ...]
    finish_reason: FinishReason
    guarantee: Guarantee
    policy: Policy
    loose_positions: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    stats: AnswerStats
    seed: int | None
    notes: tuple[str, ...]
    fetch: ContextFetch | None = None
    num_conversation_turns: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def turns(self) -> tuple[Turn, Turn]:
        """The question and this answer, to append to `history`."""
        return Turn(Role.USER, self.question), Turn(Role.ASSISTANT, self.text)

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed after the first token; None for answers of a single token."""
        num_decoded = self.num_output_tokens - 1
        return num_decoded * 1000 / self.stats.decode_ms if num_decoded > 0 and self.stats.decode_ms > 0 else None


@dataclass(frozen=True)
class ServerLimits:
    """Limits and defaults that requests are held to."""

    max_upload_bytes: int
    max_frames: int
    max_visual_tokens: int
    max_thread_tokens: int
    max_draft_tokens: int
    default_max_tokens: int
    default_num_draft_tokens: int
    default_visual_budget: float
    default_fps: float
    adapts_draft_length: bool = False


@dataclass(frozen=True)
class RelevanceInfo:
    """How the model's relevance is measured."""

    layer: int
    at_predicting: bool
    is_centred: bool
    num_nearest: int
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class ServerInfo:
    """What is served; `kv_transport` is "shm", "cuda_ipc" or "none"."""

    version: str
    model: str
    model_fingerprint: str
    kv_transport: str
    drafter_ready: bool
    deterministic: bool
    device: str
    attention_kernel: str
    pool_bytes: int
    pool_used_bytes: int
    limits: ServerLimits
    draft_modes: tuple[DraftMode, ...]
    default_policy: Policy
    allowed_policies: tuple[Policy, ...]
    max_lambda: float
    relevance: RelevanceInfo | None
    num_verifiers: int = 1
    registry: str = "memory"
    has_cold_tier: bool = False
    context_counters: Mapping[str, int] = field(default_factory=dict)
