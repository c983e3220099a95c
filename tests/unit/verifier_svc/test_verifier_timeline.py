"""Frame sampling as arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveate.rpc.errors import InvalidArgument
from verifier_svc.timeline import FramePlan, FrameSampling, TimedFrame, pick_nearest, plan_frames, resolve_sampling


@pytest.mark.parametrize(
    ("fps", "max_frames", "fields"),
    [
        (0.0, None, ["spec.sampling.fps"]),
        (-1.0, None, ["spec.sampling.fps"]),
        (60.5, None, ["spec.sampling.fps"]),
        (float("nan"), None, ["spec.sampling.fps"]),
        (float("inf"), 0, ["spec.sampling.fps", "spec.sampling.max_frames"]),
        (None, 0, ["spec.sampling.max_frames"]),
    ],
)
def test_bad_sampling_names_its_fields(fps: float | None, max_frames: int | None, fields: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve_sampling(fps, max_frames, default_fps=2, frames_ceiling=100)
    assert [violation.field for violation in caught.value.violations] == fields


@pytest.mark.parametrize(("asked", "applied"), [(None, 100), (10**9, 100), (2**32 - 1, 100), (100, 100), (7, 7)])
def test_no_request_lifts_the_ceiling(asked: int | None, applied: int) -> None:
    sampling = resolve_sampling(None, asked, default_fps=2, frames_ceiling=100)
    assert sampling == FrameSampling(2, applied)


def test_a_rate_that_arrived_as_float32_is_the_rate_that_was_meant() -> None:
    timestamps = [Fraction(index, 30) for index in range(300)]
    plan = plan_frames(timestamps, Fraction(1, 30), FrameSampling(0.20000000298023224, 1000))
    assert (plan.num_frames, plan.sampled_fps) == (2, 0.2)


def pick(timestamps: list[Fraction], plan: FramePlan) -> list[Fraction]:
    return [frame.time_s for frame in pick_nearest((TimedFrame(time, None) for time in timestamps), plan)]


gaps = st.lists(st.integers(1, 3000), min_size=0, max_size=60)


@given(gaps, st.integers(1, 500), st.floats(0.01, 60), st.integers(1, 80))
def test_any_timeline(gaps_ms: list[int], last_ms: int, fps: float, max_frames: int) -> None:
    timestamps = [Fraction(0)]
    for gap in gaps_ms:
        timestamps.append(timestamps[-1] + Fraction(gap, 1000))
    plan = plan_frames(timestamps, Fraction(last_ms, 1000), FrameSampling(fps, max_frames))
    picked = pick(timestamps, plan)
    assert 1 <= len(picked) == plan.num_frames <= max_frames
    assert picked == sorted(picked)
    assert set(picked) <= set(timestamps)
    assert plan.sampled_fps > 0
    if plan.target_times_s is None:
        assert picked == timestamps
        return
    for target, time in zip(plan.target_times_s, picked, strict=True):
        assert abs(target - time) == min(abs(target - other) for other in timestamps)


def test_a_decoder_that_ends_early_leaves_the_rest_out() -> None:
    timestamps = [Fraction(index, 10) for index in range(100)]
    plan = plan_frames(timestamps, Fraction(1, 10), FrameSampling(1, 100))
    assert pick(timestamps[:45], plan) == [0, 1, 2, 3, 4, Fraction(44, 10)]


def test_a_last_frame_that_is_shown_long_is_planned_as_often_as_it_is_used() -> None:
    timestamps = [Fraction(ms, 1000) for ms in (0, 1, 2, 3)]
    plan = plan_frames(timestamps, Fraction(31, 1000), FrameSampling(60.0, 3))
    assert len(pick(timestamps, plan)) == plan.num_frames == 2
