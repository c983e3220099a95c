"""Worlds as video files, and back."""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from os import PathLike

import av
import numpy as np
from numpy.typing import NDArray

from bench.world.draw import draw
from bench.world.facts import FRAME_SIZE
from bench.world.scenes import World

FILE_SCALE = 4  # files are drawn larger than the model sees them, so that the codec does not eat the shapes
CHUNK_FRAMES = 32
CODEC_OPTIONS = {"crf": "20", "preset": "veryfast"}


def write_mp4(world: World, path: str | PathLike[str], *, fps: float = 4.0) -> None:
    """H.264 at 192 x 192. Memory does not grow with the length of the video."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000), options=CODEC_OPTIONS)
        stream.width = stream.height = FRAME_SIZE * FILE_SCALE
        stream.pix_fmt = "yuv420p"
        for pixels in _frames(world):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def read_mp4(path: str | PathLike[str]) -> NDArray[np.uint8]:
    """All frames of a short file: [num_frames, height, width, 3]."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def iterate_mp4(path: str | PathLike[str], *, num_frames: int = 256) -> Iterator[NDArray[np.uint8]]:
    """The frames of a file of any length, so many at a time: [num_frames, height, width, 3]."""
    with av.open(str(path)) as container:
        decoded = (frame.to_ndarray(format="rgb24") for frame in container.decode(video=0))
        while chunk := list(itertools.islice(decoded, num_frames)):
            yield np.stack(chunk)


def _frames(world: World) -> Iterator[NDArray[np.uint8]]:
    num_frames = 2 * world.num_frame_pairs
    for first in range(0, num_frames, CHUNK_FRAMES):
        yield from draw(world, first_frame=first, end_frame=min(first + CHUNK_FRAMES, num_frames), scale=FILE_SCALE)
