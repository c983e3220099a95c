"""The verifier's settings: frozen, built in main.py, passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True)
class MediaLimits:
    """Bounds on what one video may cost before it reaches the model. A request can lower them, never lift them."""

    max_upload_bytes: int = 512 * MIB
    max_frames: int = 16_384
    max_visual_tokens: int = 131_072
    max_frame_pixels: int = 7680 * 4320
    # Frames that a file may hold, whatever share of them is used: bounds the time a small file can keep a decoder busy.
    max_stored_frames: int = 1_000_000
    max_duration_s: float = 12 * 3600.0
    max_decode_s: float = 600.0
    default_fps: float = 2.0


@dataclass(frozen=True)
class VerifierConfig:
    """Everything a verifier process is started with."""

    model_path: Path
    address: str = "127.0.0.1:0"
    media_root: Path | None = None
    pool_bytes: int = 1024 * MIB
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 1
    deterministic: bool = False
    max_thread_tokens: int = 4096
    max_draft_tokens: int = 16
    # Text tokens of one device step of a prefill; other answers' rounds run between two steps.
    prefill_chunk_tokens: int = 512
    # Vision patches of one device step of the vision tower.
    encode_chunk_patches: int = 8192
    # Raw frames that are decoded ahead of the vision tower.
    decode_chunk_bytes: int = 64 * MIB
    num_decode_workers: int = 2
    drain_grace_s: float = 2.0
    media: MediaLimits = field(default_factory=MediaLimits)
