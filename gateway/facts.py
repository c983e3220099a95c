"""Facts about contexts, services and limits: frozen values beside those of an answer in `values`."""

from __future__ import annotations

from dataclasses import dataclass

from foveate.video import ContextTimings, VideoFacts


@dataclass(frozen=True)
class FrameSampling:
    """How frames are picked; None leaves it to the verifier."""

    fps: float | None = None
    max_frames: int | None = None


@dataclass(frozen=True)
class ContextSpec:
    """What to prefill: an upload that follows in chunks (`path` is None), or a file below the verifier's media root."""

    path: str | None
    filename: str = ""
    total_bytes: int = 0
    sampling: FrameSampling = FrameSampling()


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


@dataclass(frozen=True)
class Context:
    """A prefilled video."""

    name: str
    video: VideoFacts
    num_visual_tokens: int
    num_tokens: int
    kv_bytes: int
    create_time_ns: int
    reused: bool
    timings: ContextTimings


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
    default_visual_budget: float
    default_fps: float


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


@dataclass(frozen=True)
class DrafterInfo:
    """What the drafter runs."""

    version: str
    model: str
    model_fingerprint: str
    max_draft_tokens: int


@dataclass(frozen=True)
class ServerInfo:
    """What the gateway serves."""

    verifier: VerifierInfo
    limits: Limits
    drafter_ready: bool
