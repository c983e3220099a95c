"""Reads a video: facts first, then the timeline, then the frames that are wanted, a chunk at a time.

Everything here runs in a decode worker, never on the event loop or the device thread. The file is untrusted: the
demuxer is fixed by its first bytes, every loop is bounded, and whatever libav raises leaves as INVALID_ARGUMENT.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import av.container
import av.error
import numpy as np
import numpy.typing as npt

from foveate.rpc.errors import FoveateError, ResourceExhausted, invalid
from verifier_svc.limits import MediaLimits
from verifier_svc.media import TIMELESS_FORMAT, Media, container_format, not_a_video
from verifier_svc.timeline import FramePlan, FrameSampling, TimedFrame, pick_nearest, plan_frames

RgbFrame = npt.NDArray[np.uint8]
# No nested file or host may be opened by a demuxer, whatever the content says.
_CONTAINER_OPTIONS = {"protocol_whitelist": "", "enable_drefs": "0"}


@dataclass(frozen=True)
class StreamFacts:
    """What the container claims before anything is read; only good for refusing early. 0: not told."""

    width: int
    height: int
    claimed_num_frames: int
    claimed_duration_s: float


@dataclass(frozen=True)
class Timeline:
    """True presentation times of the stored frames, in seconds from the first, and how long the last is shown."""

    timestamps_s: tuple[Fraction, ...]
    last_frame_s: Fraction

    def plan(self, sampling: FrameSampling) -> FramePlan:
        """Plans which frames to use."""
        return plan_frames(self.timestamps_s, self.last_frame_s, sampling)


@dataclass(frozen=True)
class FrameChunk:
    """Consecutive used frames: RGB [num_frames, height, width, 3], and their times in seconds from the first frame."""

    frames: RgbFrame
    timestamps_s: tuple[float, ...]


@dataclass(frozen=True)
class VideoFile:
    """A video of a known container format; each method opens and closes its own demuxer over the same bytes."""

    media: Media
    format_name: str
    limits: MediaLimits
    num_threads: int = 1

    @classmethod
    def of(cls, media: Media, limits: MediaLimits, *, num_threads: int = 1) -> VideoFile:
        """Tells the container from the first bytes; INVALID_ARGUMENT when it is none of ours."""
        return cls(media, container_format(media), limits, num_threads)

    def facts(self) -> StreamFacts:
        """Reads the headers; refuses frames too large to decode before one is."""
        with self._opened() as (container, stream):
            width, height = int(stream.codec_context.width), int(stream.codec_context.height)
            if width < 1 or height < 1:  # also what libav makes of sizes beyond its own limits
                raise not_a_video(self.media, "claims no usable frame size")
            self._check_pixels(width, height)
            duration = float(stream.duration * stream.time_base) if stream.duration else 0.0
            if not duration and container.duration:
                duration = container.duration / av.time_base
            self._check_duration(duration)
            return StreamFacts(width, height, claimed_num_frames=int(stream.frames), claimed_duration_s=duration)

    def timeline(self) -> Timeline:
        """Reads every packet's time without decoding; a file cut short has the times of what is left."""
        times: list[Fraction] = []
        durations: list[Fraction] = []
        with self._opened() as (container, stream):
            for packet in _packets(container, stream):
                if packet.is_discard or packet.size == 0:
                    continue
                tick = packet.pts if packet.pts is not None else packet.dts
                if tick is None:
                    continue
                times.append(tick * Fraction(packet.time_base))
                durations.append((packet.duration or 0) * Fraction(packet.time_base))
                self._check_stored_frames(len(times))
        if not times:
            raise not_a_video(self.media, "has no video frame")
        if len(times) > 1 and self.format_name == TIMELESS_FORMAT and self.media.stored_fps is None:
            raise invalid("spec.sampling.stored_fps", f"must be set: {len(times)} JPEGs do not say when they are shown")
        order = sorted(range(len(times)), key=times.__getitem__)
        timestamps = tuple(times[index] - times[order[0]] for index in order)
        self._check_duration(float(timestamps[-1]))
        return Timeline(timestamps, durations[order[-1]] or _mean_spacing(timestamps))

    def read(self, plan: FramePlan, *, frames_per_chunk: int) -> Iterator[FrameChunk]:
        """Decodes the frames of `plan`, `frames_per_chunk` at a time; the last chunk may be shorter.

        Raises INVALID_ARGUMENT when nothing decodes, RESOURCE_EXHAUSTED when decoding takes longer than the limit.
        """
        frames: list[RgbFrame] = []
        times: list[float] = []
        size: tuple[int, int] | None = None
        is_empty = True
        for timed in pick_nearest(self._decoded(), plan):
            size = size or (timed.frame.width, timed.frame.height)
            frames.append(_to_rgb(timed.frame, size))
            times.append(float(timed.time_s))
            is_empty = False
            if len(frames) == frames_per_chunk:
                yield FrameChunk(np.stack(frames), tuple(times))
                frames, times = [], []
        if is_empty:
            raise not_a_video(self.media, "has no frame that can be decoded")
        if frames:
            yield FrameChunk(np.stack(frames), tuple(times))

    def _decoded(self) -> Iterator[TimedFrame[Any]]:
        """Yields the decoder's frames with their times from the first; a packet it cannot decode is left out."""
        deadline = time.monotonic() + self.limits.max_decode_s
        first: Fraction | None = None
        last = Fraction(-1)
        with self._opened() as (container, stream):
            stream.codec_context.thread_count = self.num_threads
            for packet in _packets(container, stream, flush=True):
                if time.monotonic() > deadline:
                    raise _over(
                        "decoding seconds", self.limits.max_decode_s, self.limits.max_decode_s, "DECODE_TOO_LONG"
                    )
                for frame in _decode(stream, packet):
                    if frame.pts is None:
                        continue
                    self._check_pixels(frame.width, frame.height)
                    moment = frame.pts * Fraction(frame.time_base)
                    first = moment if first is None else first
                    if moment - first > last:  # a decoder that repeats or goes back in time adds nothing
                        last = moment - first
                        yield TimedFrame(last, frame)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """Opens the demuxer and its first real video stream; libav's errors become INVALID_ARGUMENT."""
        self.media.file.seek(0)
        try:
            # A view that cannot close the file: libav's wrapper closes what it is given.
            with av.open(_Unclosable(self.media.file), format=self.format_name, options=self._options()) as container:
                streams = [stream for stream in container.streams.video if not _is_cover(stream)]
                if not streams:
                    raise not_a_video(self.media, "has no video stream")
                yield container, streams[0]
        except FoveateError:
            raise
        except (av.error.FFmpegError, ValueError, OverflowError) as error:
            raise not_a_video(self.media, "is damaged or incomplete and cannot be read") from error

    def _options(self) -> dict[str, str]:
        if self.format_name != TIMELESS_FORMAT or self.media.stored_fps is None:
            return _CONTAINER_OPTIONS
        rate = Fraction(self.media.stored_fps).limit_denominator(1_000_000)
        return {**_CONTAINER_OPTIONS, "framerate": f"{rate.numerator}/{rate.denominator}"}

    def _check_pixels(self, width: int, height: int) -> None:
        if width * height > self.limits.max_frame_pixels:
            raise _over("pixels in a frame", width * height, self.limits.max_frame_pixels, "FRAME_TOO_LARGE")

    def _check_duration(self, duration_s: float) -> None:
        if duration_s > self.limits.max_duration_s:
            raise _over("seconds of video", duration_s, self.limits.max_duration_s, "VIDEO_TOO_LONG")

    def _check_stored_frames(self, num_frames: int) -> None:
        if num_frames > self.limits.max_stored_frames:
            raise _over("stored frames", num_frames, self.limits.max_stored_frames, "VIDEO_TOO_LONG")


class _Unclosable:
    """Read access to a file whose owner is somebody else."""

    def __init__(self, file: Any) -> None:
        self.read = file.read
        self.seek = file.seek
        self.tell = file.tell


def _packets(container: Any, stream: Any, *, flush: bool = False) -> Iterator[Any]:
    """Yields the stream's packets up to the end or the first place where the file cannot be read any further."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except av.error.FFmpegError:
            if flush:
                yield None
            return
        if packet.size or flush:
            yield packet


def _decode(stream: Any, packet: Any) -> list[Any]:
    try:
        return list(stream.codec_context.decode(packet))
    except (av.error.InvalidDataError, av.error.EOFError):
        return []


def _to_rgb(frame: Any, size: tuple[int, int]) -> RgbFrame:
    """Converts to RGB [height, width, 3], upright, in the size of the first frame."""
    pixels: RgbFrame = frame.to_ndarray(format="rgb24", width=size[0], height=size[1])
    quarter_turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, quarter_turns)) if quarter_turns else pixels


def _is_cover(stream: Any) -> bool:
    return bool(stream.disposition & av.stream.Disposition.attached_pic)


def _mean_spacing(timestamps: tuple[Fraction, ...]) -> Fraction:
    return timestamps[-1] / (len(timestamps) - 1) if len(timestamps) > 1 else Fraction(0)


def _over(what: str, needed: float, limit: float, reason: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"the video needs {needed:g} {what}; the limit is {limit:g}",
        reason=reason,
        metadata={"needed": f"{needed:g}", "limit": f"{limit:g}"},
    )
