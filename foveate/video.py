"""What is known of a prefilled video: the same values in the verifier, the gateway and the clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VideoFacts:
    """The video as it was read; times in seconds, `width` and `height` of the stored frames in pixels."""

    duration_s: float
    num_frames: int
    sampled_fps: float
    frame_timestamps_s: tuple[float, ...]
    width: int
    height: int


@dataclass(frozen=True)
class ContextTimings:
    """Milliseconds spent making a context."""

    decode_ms: float
    encode_ms: float
    prefill_ms: float
