"""Reading videos: cases V1, V2 and V3, every container, and files that are no videos."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest

from foveate.rpc.errors import InvalidArgument, ResourceExhausted
from tests.unit.verifier_svc import clips
from verifier_svc.config import MediaLimits
from verifier_svc.media import Media
from verifier_svc.timeline import FramePlan, FrameSampling
from verifier_svc.video import VideoFile


def video_of(data: bytes, limits: MediaLimits | None = None) -> VideoFile:
    return VideoFile.of(Media(io.BytesIO(data), len(data), "hash", "spec.upload"), limits or MediaLimits())


def read(
    video: VideoFile, sampling: FrameSampling, *, frames_per_chunk: int = 8
) -> tuple[FramePlan, np.ndarray, list[float]]:
    plan = video.timeline().plan(sampling)
    chunks = list(video.read(plan, frames_per_chunk=frames_per_chunk))
    assert all(len(chunk.frames) == len(chunk.timestamps_s) <= frames_per_chunk for chunk in chunks)
    return plan, np.concatenate([chunk.frames for chunk in chunks]), [t for chunk in chunks for t in chunk.timestamps_s]


@pytest.mark.parametrize("num_frames", [1, 2, 3, 9, 26])
def test_all_frames_are_used_when_more_are_asked_for(num_frames: int) -> None:
    plan, frames, times = read(video_of(clips.clip(num_frames, fps=4)), FrameSampling(60, 32))
    assert len(frames) == plan.num_frames == num_frames
    assert times == [index / 4 for index in range(num_frames)]
    assert plan.sampled_fps == 4.0


def test_stored_rate_is_met_exactly() -> None:
    plan, frames, _ = read(video_of(clips.clip(17, fps=4)), FrameSampling(4, 1000))
    assert (len(frames), plan.sampled_fps, plan.duration_s) == (17, 4.0, 4.25)


@pytest.mark.parametrize("fps", [1, 4])
def test_a_rate_thins_out_evenly(fps: int) -> None:
    plan, frames, times = read(video_of(clips.BIKES.read_bytes()), FrameSampling(fps, 1000))
    assert (len(frames), plan.sampled_fps, plan.duration_s) == (10 * fps, fps, 10.0)
    assert all(abs(time - index / fps) <= 0.02 + 1e-9 for index, time in enumerate(times))


def test_a_ceiling_spreads_over_the_whole_length() -> None:
    plan, frames, times = read(video_of(clips.BIKES.read_bytes()), FrameSampling(4, 5))
    assert (len(frames), plan.sampled_fps) == (5, 0.5)
    assert times == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("container", "codec"), [("webm", "libvpx"), ("mov", "mpeg4"), ("matroska", "mpeg4"), ("gif", "gif")]
)
def test_containers(container: str, codec: str) -> None:
    plan, frames, times = read(video_of(clips.clip(6, container=container, codec=codec)), FrameSampling(4, 32))
    assert frames.shape == (6, 48, 64, 3)
    assert times == [index / 4 for index in range(6)]
    assert plan.sampled_fps == pytest.approx(4.0)


def test_true_timestamps_of_a_variable_rate() -> None:
    ticks = [0, 100, 200, 300, 2300, 4300, 4400]
    video = video_of(clips.clip(7, container="matroska", ticks=ticks))
    plan, frames, times = read(video, FrameSampling(60, 32))
    assert times == [tick / 1000 for tick in ticks]
    assert plan.sampled_fps == pytest.approx(6 / 4.4)
    # One frame a second: in a gap the nearest frame stands for the time.
    thin, _, thin_times = read(video, FrameSampling(1, 32))
    assert thin_times == [0, 0.3, 2.3, 2.3, 4.3]
    assert thin.sampled_fps == 1.0
    assert len(frames) == 7


def test_chunks_are_the_whole() -> None:
    video = video_of(clips.clip(11))
    _, whole, _ = read(video, FrameSampling(60, 100), frames_per_chunk=100)
    _, pieces, _ = read(video, FrameSampling(60, 100), frames_per_chunk=4)
    assert np.array_equal(whole, pieces)
    assert len(np.unique(whole[:, -1, -1, 0])) == 11  # every frame is its own


def test_a_phone_clip_is_put_upright() -> None:
    data = clips.clip(2, size=(64, 48))
    _, lying, _ = read(video_of(data), FrameSampling(4, 8))
    _, upright, _ = read(video_of(clips.rotated(data)), FrameSampling(4, 8))
    assert np.array_equal(upright, np.rot90(lying, -1, axes=(1, 2)))


def test_a_truncated_file_gives_what_is_there() -> None:
    data = clips.index_first(clips.BIKES)
    video = video_of(data[: len(data) * 8 // 10])
    assert video.facts().claimed_num_frames == 250
    plan, frames, times = read(video, FrameSampling(5, 1000))
    assert 30 <= plan.num_frames < 50
    assert plan.num_frames - 1 <= len(frames) <= plan.num_frames
    # The last one may be a frame that was cut off in the middle: the one before it stands in.
    assert all(abs(time - index / 5) <= 0.02 + 1e-9 for index, time in enumerate(times[:-1]))
    assert times[-2] <= times[-1] <= 7.64


def test_a_file_that_lost_its_index_is_refused() -> None:
    data = clips.BIKES.read_bytes()
    with pytest.raises(InvalidArgument, match="damaged or incomplete"):
        video_of(data[: len(data) * 8 // 10]).timeline()


def test_damaged_frames_never_crash() -> None:
    data = bytearray(clips.index_first(clips.BIKES))
    rng = np.random.default_rng(1)
    for place in rng.integers(5000, len(data), 3000):
        data[place] = rng.integers(0, 256)
    plan, frames, times = read(video_of(bytes(data)), FrameSampling(5, 1000))
    assert 0 < len(frames) <= plan.num_frames
    assert times == sorted(times)


@pytest.mark.parametrize("kind", clips.NOT_VIDEOS)
def test_what_is_no_video_is_refused(kind: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        video_of(clips.NOT_VIDEOS[kind]).timeline()
    assert caught.value.violations[0].field == "spec.upload"
    assert caught.value.reason == "UNREADABLE_VIDEO"


@pytest.mark.parametrize("make", [clips.audio_only, clips.without_frames])
def test_files_without_frames_are_refused(make: Callable[[], bytes]) -> None:
    with pytest.raises(InvalidArgument, match=r"has no video|damaged"):
        video_of(make()).timeline()


@pytest.mark.parametrize("size", [(60_000, 60_000), (10_000, 9_000)])
def test_claimed_sizes_are_refused_before_decoding(size: tuple[int, int]) -> None:
    with pytest.raises((InvalidArgument, ResourceExhausted)):
        video_of(clips.gif_claiming(*size)).facts()


def test_bounds_hold() -> None:
    data = clips.clip(20)
    plan = video_of(data).timeline().plan(FrameSampling(4, 100))
    with pytest.raises(ResourceExhausted, match="stored frames; the limit is 19"):
        video_of(data, MediaLimits(max_stored_frames=19)).timeline()
    with pytest.raises(ResourceExhausted, match="the limit is 1"):
        video_of(data, MediaLimits(max_duration_s=1)).facts()
    with pytest.raises(ResourceExhausted, match="pixels"):
        video_of(data, MediaLimits(max_frame_pixels=100)).facts()
    with pytest.raises(ResourceExhausted, match="decoding seconds"):
        list(video_of(data, MediaLimits(max_decode_s=-1)).read(plan, frames_per_chunk=4))
