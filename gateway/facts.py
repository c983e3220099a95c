"""Facts about contexts, services and limits: frozen values beside those of an answer in `values`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from foveate.context_source import ContextFetch, ContextSource
from foveate.video import ContextTimings, VideoFacts
from gateway.values import AcceptancePolicy, DraftMode


@dataclass(frozen=True)
class FrameSampling:
    """How frames are picked; None leaves it to the verifier."""

    fps: float | None = None
    max_frames: int | None = None
    stored_fps: float | None = None


@dataclass(frozen=True)
class ContextSpec:
    """What to prefill: a file below the verifier's media root, a `url`, or, without both, an upload in chunks."""

    path: str | None
    filename: str = ""
    total_bytes: int = 0
    sampling: FrameSampling = FrameSampling()
    request_id: str = ""
    sha256: str = ""
    url: str = ""


@dataclass(frozen=True)
class MediaChunk:
    """A piece of an upload."""

    write_offset: int
    data: bytes


@dataclass(frozen=True)
class ContextProgress:
    """How far a stage of making a context is; `stage` is the number in `foveate.v1.ContextStage`."""

    stage: int
    done: int
    total: int


class ContextState(IntEnum):
    """Where a context is in its life; numbers are those of `foveate.v1.ContextState`."""

    READY = 1
    COLD = 2


@dataclass(frozen=True)
class Context:
    """A prefilled video; `expire_time_ns` is None when it is pinned, `tiers` has the bytes held in each."""

    name: str
    video: VideoFacts
    num_visual_tokens: int
    num_tokens: int
    kv_bytes: int
    create_time_ns: int
    reused: bool
    timings: ContextTimings
    state: ContextState = ContextState.READY
    expire_time_ns: int | None = None
    tiers: Mapping[ContextSource, int] = field(default_factory=dict)
    num_hits: int = 0
    pinned: bool = False
    fetch: ContextFetch | None = None
    media_sha256: str = ""
    lossy: bool = False


@dataclass(frozen=True)
class ContextFilter:
    """Which contexts to list; None lets all pass."""

    state: ContextState | None = None
    media_sha256: str | None = None

    def admits(self, context: Context) -> bool:
        """Returns whether a context is to be listed."""
        has_state = self.state is None or context.state is self.state
        return has_state and self.media_sha256 in (None, context.media_sha256)


@dataclass(frozen=True)
class HeldContext:
    """A context and the pool that holds it."""

    context: Context
    pool_id: str


@dataclass(frozen=True)
class RelevanceInfo:
    """How the model's relevance is measured; see `foveate.v1.RelevanceInfo`."""

    layer: int
    at_predicting: bool
    is_centred: bool
    num_nearest: int
    quantiles: tuple[float, ...] = ()


@dataclass(frozen=True)
class AcceptanceLimits:
    """Which policies answers may have; `relevance` None: the verifier keeps no visual states."""

    default: AcceptancePolicy = AcceptancePolicy.EXACT
    allowed: frozenset[AcceptancePolicy] = frozenset(AcceptancePolicy)
    max_lambda: float = 1.0
    relevance: RelevanceInfo | None = None


@dataclass(frozen=True)
class Limits:
    """Limits and defaults that requests are held to."""

    max_upload_bytes: int
    max_frames: int
    max_visual_tokens: int
    max_thread_tokens: int
    max_draft_tokens: int
    max_tokens_ceiling: int
    default_max_tokens: int
    default_num_draft_tokens: int
    adapts_draft_length: bool
    default_visual_budget: float
    default_fps: float
    acceptance: AcceptanceLimits
    vocab_size: int


@dataclass(frozen=True)
class KvLayout:
    """What a row of KV looks like."""

    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_layers} layers, {self.num_kv_heads} KV heads of {self.head_dim}, {self.dtype or 'no dtype'}"


@dataclass(frozen=True)
class VerifierInfo:
    """What the verifier runs; `limits` are its own, without the gateway's defaults."""

    version: str
    model: str
    model_fingerprint: str
    tokenizer_sha256: str
    eos_token_ids: frozenset[int]
    kv_transport: str
    pool_bytes: int
    pool_used_bytes: int
    device: str
    deterministic: bool
    attention_kernel: str
    max_upload_bytes: int
    max_frames: int
    max_visual_tokens: int
    max_thread_tokens: int
    max_draft_tokens: int
    default_fps: float
    relevance: RelevanceInfo | None
    layout: KvLayout
    pool_id: str = ""
    num_sequences: int = 0
    has_cold_tier: bool = False
    context_counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafts that a drafter offers, and the model behind it."""

    mode: DraftMode
    model: str
    model_fingerprint: str
    tokenizer_sha256: str
    layout: KvLayout


@dataclass(frozen=True)
class DrafterInfo:
    """What the drafter runs."""

    version: str
    model: str
    model_fingerprint: str
    max_draft_tokens: int
    kinds: tuple[DrafterKind, ...]
    shm_namespace: str = ""


@dataclass(frozen=True)
class ServerInfo:
    """What the gateway serves."""

    verifier: VerifierInfo
    limits: Limits
    drafter_ready: bool
    draft_modes: frozenset[DraftMode]
    registry: str = "memory"
    num_verifiers: int = 1
    context_counters: Mapping[str, int] = field(default_factory=dict)
