"""Bounds on media: apart from the other settings, so that a decoder process need not load what those need."""

from __future__ import annotations

from dataclasses import dataclass

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
    # Address space of a decoder process: frames of the largest size, as many as a codec keeps, and the libraries.
    max_decoder_bytes: int = 4096 * MIB
    default_fps: float = 2.0
