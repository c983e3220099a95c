"""What the client takes and returns, as frozen values; field meanings are those of protos/foveate/v1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypedDict

from foveate.video import ContextTimings, VideoFacts


class Stage(StrEnum):
    """A stage of making a context, in order; units are bytes, frames, frames and tokens."""

    UPLOAD = "upload"
    DECODE = "decode"
    ENCODE = "encode"
    PREFILL = "prefill"


class DraftMode(StrEnum):
    """Where drafts come from; none of them changes the answer."""

    OFF = "off"
    SPARSE = "sparse"
    NGRAM = "ngram"


class Selection(StrEnum):
    """How the sparse drafter's visual entries are picked."""

    ATTENTION = "attention"
    RANDOM = "random"
    RECENT = "recent"


class Origin(StrEnum):
    """Where a token came from: a draft, or the verifier: for a rejected draft, after a full one, without one."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    PLAIN = "plain"


class FinishReason(StrEnum):
    """Why an answer ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"


class Guarantee(StrEnum):
    """What holds for an answer's tokens against plain decoding."""

    LOSSLESS = "lossless"
    LOOSE = "loose"


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


@dataclass(frozen=True)
class Context:
    """A prefilled video; `reused` when creating it found it already there."""

    name: str
    video: VideoFacts
    num_visual_tokens: int
    num_tokens: int
    kv_bytes: int
    create_time: datetime
    reused: bool
    timings: ContextTimings


@dataclass(frozen=True)
class Turn:
    """An earlier turn of a conversation."""

    role: Role
    text: str


class AskOptions(TypedDict, total=False):
    """Options of a question; whatever is absent or None is the server's default.

    `history` are earlier turns, oldest first, ending with the model's (see `Answer.turns`).
    `visual_budget` is the share of visual tokens that the sparse drafter keeps, 0 to 1.
    `explain` asks for the origin and the text of every token.
    `timeout_s` bounds the whole call; when it passes: DeadlineExceeded.
    """

    history: Sequence[Turn]
    max_tokens: int | None
    stop: Sequence[str]
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    draft: DraftMode | None
    num_draft_tokens: int | None
    visual_budget: float | None
    selection: Selection | None
    explain: bool
    timeout_s: float | None


@dataclass(frozen=True)
class Delta:
    """More of an answer: append `text`. `origins` and `token_texts` go with `token_ids` if `explain` was asked."""

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...] = ()
    token_texts: tuple[str, ...] = ()


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
    time_to_first_token_ms: float
    prefill_ms: float
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    decode_ms: float
    round_overhead_ms: tuple[float, ...]

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
    finish_reason: FinishReason
    guarantee: Guarantee
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    stats: AnswerStats
    seed: int | None
    notes: tuple[str, ...]

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
