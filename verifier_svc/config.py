"""The verifier's settings: frozen, built in main.py, passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.placement import DeviceMap
from foveate.registration import RegistrationConfig
from foveate.rpc.serving import ServingConfig
from foveate.store.client import StoreSettings
from verifier_svc.fetching import FetchLimits
from verifier_svc.limits import MIB, MediaLimits

__all__ = ["MIB", "MediaLimits", "VerifierConfig"]


@dataclass(frozen=True)
class ColdConfig:
    """The cold tier in Redis. `max_bytes` bounds all copies of all verifiers together, as the index knows them."""

    redis: StoreSettings
    ttl_s: float = 24 * 3600.0
    max_bytes: int = 16 * 1024 * MIB
    num_connections: int = 4
    # Video files up to this size are kept as well, so that a context can be made anew when nothing else is left of it.
    max_media_bytes: int = 64 * MIB
    # How long a verifier that ends goes on to write contexts that only it has.
    hand_over_s: float = 5.0
    # Keys and values are written in eight bits, and such copies may be read: smaller, and not exact.
    int8: bool = False


@dataclass(frozen=True)
class VerifierConfig:
    """Everything a verifier process is started with."""

    model_path: Path
    address: str = "127.0.0.1:0"
    media_root: Path | None = None
    pool_bytes: int = 1024 * MIB
    device: str = "cpu"
    dtype: str = "float32"
    # Spreads a model that is too large for one device; takes the place of `device`.
    device_map: DeviceMap | None = None
    num_threads: int = 1
    deterministic: bool = False
    # Folder of the compiled CPU kernel; None runs steps on PyTorch's kernels.
    kernel_cache: Path | None = None
    max_thread_tokens: int = 4096
    max_draft_tokens: int = 16
    # Answers that may be open at once; more are refused, to be asked again.
    max_sequences: int = 256
    # Visual hidden states are kept with each context, for policies that ask how much a token looks at the video.
    keep_visual_states: bool = True
    # Processed patches are kept with each context, for drafters with a vision tower of their own.
    keep_patches: bool = False
    # Rows of one step over all answers that are ready. On a CPU more together are hardly cheaper, and drafters idle.
    max_step_rows: int = 48
    # Text tokens of one piece of a prefill, at most; other answers' rounds run between two pieces.
    prefill_chunk_tokens: int = 512
    # Vision patches of one device step of the vision tower.
    encode_chunk_patches: int = 8192
    # Raw frames that are decoded ahead of the vision tower.
    decode_chunk_bytes: int = 64 * MIB
    num_decode_workers: int = 2
    fetch: FetchLimits = field(default_factory=FetchLimits)
    num_fetch_workers: int = 4
    # Decoder processes that are started ahead of the next video.
    num_spare_decoders: int = 1
    drain_grace_s: float = 2.0
    # A context that nobody used for so long is freed, unless it is pinned.
    context_ttl_s: float = 24 * 3600.0
    cold: ColdConfig | None = None
    media: MediaLimits = field(default_factory=MediaLimits)
    serving: ServingConfig = field(default_factory=ServingConfig)
    registration: RegistrationConfig | None = None
