"""Golden positions of the release rule."""

from __future__ import annotations

import pytest
import torch

from engine.families.qwen2_5_vl import Qwen25VlFamily
from engine.families.qwen2_vl import Qwen2VlFamily

VIDEO, IMAGE, START, END = 7, 6, 3, 4
FACTS = {
    "video_token_id": VIDEO,
    "image_token_id": IMAGE,
    "marker_token_ids": (START, END),
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN25 = Qwen25VlFamily(**FACTS, tokens_per_second=2)
QWEN2 = Qwen2VlFamily(**FACTS)


def axes(ids: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    time, height, width = ids.tolist()
    return time, height, width


@pytest.mark.parametrize(
    ("interval", "temporal", "next_text"), [(1.0, [2, 4, 6, 8], 9), (0.5, [2, 3, 4, 5], 6), (0.25, [2, 2, 3, 3], 4)]
)
def test_video_after_two_text_tokens(interval: float, temporal: list[int], next_text: int) -> None:
    token_ids = [10, 11, *[VIDEO] * 16, 12, 13]
    positions = QWEN25.positions(token_ids, [(4, 4, 4)], [interval])
    time, height, width = axes(positions.ids)
    assert time[:2] == height[:2] == width[:2] == [0, 1]
    assert time[2:18] == [step for step in temporal for _ in range(4)]
    assert height[2:18] == [2, 2, 3, 3] * 4
    assert width[2:18] == [2, 3, 2, 3] * 4
    assert time[18:] == height[18:] == width[18:] == [next_text, next_text + 1]
    assert positions.next_position == next_text + 2


def test_wide_and_short_video_is_followed_by_its_width() -> None:
    positions = QWEN25.positions([10, *[VIDEO] * 10, 11], [(1, 4, 10)], [1.0])
    assert positions.ids[:, -1].tolist() == [6, 6, 6]


def test_qwen2_vl_counts_steps_whatever_the_interval() -> None:
    token_ids = [10, 11, *[VIDEO] * 16, 12]
    for interval in (0.5, 1.0, 10.0):
        positions = QWEN2.positions(token_ids, [(4, 4, 4)], [interval])
        assert positions.ids[0].tolist() == [0, 1, *[step for step in (2, 3, 4, 5) for _ in range(4)], 6]


def test_images_and_several_videos_in_order() -> None:
    token_ids = [10, START, *[VIDEO] * 2, END, START, *[IMAGE] * 4, END, START, *[VIDEO] * 3, END]
    positions = QWEN25.positions(token_ids, [(2, 2, 2), (3, 2, 2)], [1.0, 2.0], image_grids=[(1, 4, 4)])
    time, height, width = axes(positions.ids)
    assert time == [0, 1, 2, 4, 5, 6, 7, 7, 7, 7, 9, 10, 11, 15, 19, 20]
    assert height == [0, 1, 2, 2, 5, 6, 7, 7, 8, 8, 9, 10, 11, 11, 11, 20]
    assert width == [0, 1, 2, 2, 5, 6, 7, 8, 7, 8, 9, 10, 11, 11, 11, 20]
    assert positions.next_position == 21


def test_intervals_are_multiplied_as_in_training() -> None:
    # 29 steps of 0.1 s at 2 tokens a second, in float32.
    positions = QWEN25.positions([VIDEO] * 31, [(31, 2, 2)], [0.1])
    steps = torch.arange(31) * torch.tensor(0.1) * 2
    assert positions.ids[0].tolist() == steps.long().tolist()


def test_text_only() -> None:
    positions = QWEN25.positions([10, 11, 12], [], [])
    assert positions.ids.tolist() == [[0, 1, 2]] * 3
    assert positions.next_position == 3
    assert QWEN25.positions([], [], []).next_position == 0


@pytest.mark.parametrize(
    ("token_ids", "grids", "intervals", "message"),
    [
        ([VIDEO] * 15, [(4, 4, 4)], [1.0], "fewer placeholders"),
        ([VIDEO] * 16, [], [], "no vision grid"),
        ([10], [(4, 4, 4)], [1.0], "more vision grids"),
        ([VIDEO] * 16, [(4, 4, 4)], [], "intervals"),
    ],
)
def test_mismatches_are_refused(
    token_ids: list[int], grids: list[tuple[int, int, int]], intervals: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        QWEN25.positions(token_ids, grids, intervals)
