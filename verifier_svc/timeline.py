"""Which frames of a video to look at: pure arithmetic on the true timeline, in exact fractions of a second.

stored frames   |  |  | |     |        |  |      pts of the container, any spacing (variable frame rate)
target times    ^     ^     ^     ^     ^        every 1/fps s, or thinner over the whole length to stay in max_frames
used frames     |     |       |        | |       the nearest stored frame of each target time
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

from foveate.rpc.errors import FieldViolation, InvalidArgument

MAX_FPS = 60.0
MAX_STORED_FPS = 1000.0
Frame = TypeVar("Frame")


@dataclass(frozen=True)
class FrameSampling:
    """Frames per second of video to look at, and a bound on their number; server ceilings are already applied.

    `stored_fps` is the rate of a file that says none itself.
    """

    fps: float
    max_frames: int
    stored_fps: float | None = None


def resolve_sampling(
    fps: float | None,
    max_frames: int | None,
    stored_fps: float | None = None,
    *,
    default_fps: float,
    frames_ceiling: int,
) -> FrameSampling:
    """Validates what was asked (None: unset) and bounds it by the server's ceiling, which no request can lift."""
    violations = []
    if fps is not None and not (math.isfinite(fps) and 0 < fps <= MAX_FPS):
        violations.append(FieldViolation("spec.sampling.fps", f"must be in (0, {MAX_FPS:g}], is {fps:g}"))
    if max_frames is not None and max_frames < 1:
        violations.append(FieldViolation("spec.sampling.max_frames", f"must be at least 1, is {max_frames}"))
    if stored_fps is not None and not (math.isfinite(stored_fps) and 0 < stored_fps <= MAX_STORED_FPS):
        message = f"must be in (0, {MAX_STORED_FPS:g}], is {stored_fps:g}"
        violations.append(FieldViolation("spec.sampling.stored_fps", message))
    if violations:
        raise InvalidArgument("the frame sampling is not valid", violations=violations)
    bounded = frames_ceiling if max_frames is None else min(max_frames, frames_ceiling)
    return FrameSampling(default_fps if fps is None else fps, bounded, stored_fps)


@dataclass(frozen=True)
class FramePlan:
    """The frames to use: every stored one when `target_times_s` is None, else the nearest frame of each target time.

    `sampled_fps` is the mean rate of the used frames: of the target times, from which a used frame is away by the
    stored video's jitter only, or of the stored frames when all are used.
    """

    num_frames: int
    sampled_fps: float
    duration_s: float
    target_times_s: tuple[Fraction, ...] | None


def plan_frames(timestamps_s: Sequence[Fraction], last_frame_s: Fraction, sampling: FrameSampling) -> FramePlan:
    """Plans the frames of a video whose stored frames start at `timestamps_s` (ascending, not empty).

    `last_frame_s` is how long the last one is shown. All frames are used when fewer are stored than were asked for.
    """
    num_stored = len(timestamps_s)
    span = timestamps_s[-1] - timestamps_s[0]
    duration = span + last_frame_s
    fps = Fraction(sampling.fps).limit_denominator(1_000_000)
    # A target time that misses the end by a rounding error of the container's clock is not one more frame.
    num_wanted = max(1, math.ceil(duration * fps - Fraction(1, 100)))
    num_frames = min(num_wanted, sampling.max_frames)
    if num_frames >= num_stored:
        rate = Fraction(num_stored - 1) / span if span > 0 else _rate_of_one(duration, fps)
        return FramePlan(num_stored, float(rate), float(duration), None)
    step = 1 / fps if num_frames == num_wanted else duration / num_frames
    # However long the last frame is shown, it stands for one time beyond itself at most.
    times = tuple(index * step for index in range(num_frames) if index * step - span <= step)
    return FramePlan(len(times), float(1 / step), float(duration), times)


def _rate_of_one(duration: Fraction, fps: Fraction) -> Fraction:
    return 1 / duration if duration > 0 else fps


@dataclass(frozen=True)
class TimedFrame(Generic[Frame]):
    """A frame and its time in seconds from the first one."""

    time_s: Fraction
    frame: Frame


def pick_nearest(frames: Iterable[TimedFrame[Frame]], plan: FramePlan) -> Iterator[TimedFrame[Frame]]:
    """Yields the frames of `plan` from the decoder's output in one pass; in a gap a frame may stand for several times.

    When the decoder ends before the timeline did, the times beyond its last frame are left out rather than filled.
    """
    if plan.target_times_s is None:
        yield from frames
        return
    times = plan.target_times_s
    step = times[1] - times[0] if len(times) > 1 else Fraction(1, 2)
    done = 0
    previous: TimedFrame[Frame] | None = None
    for current in frames:
        while done < len(times) and current.time_s >= times[done]:
            is_nearer = previous is None or current.time_s - times[done] < times[done] - previous.time_s
            yield current if is_nearer or previous is None else previous
            done += 1
        if done == len(times):
            return
        previous = current
    while previous is not None and done < len(times) and times[done] - previous.time_s <= step:
        yield previous
        done += 1
