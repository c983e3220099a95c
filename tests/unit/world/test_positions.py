import pytest
import torch

from bench.world.positions import Grid, prompt_positions, video_positions

VIDEO = 7


def prompt(num_before: int, num_visual: int, num_after: int) -> torch.Tensor:
    return torch.tensor([1] * num_before + [VIDEO] * num_visual + [1] * num_after)


@pytest.mark.parametrize(
    ("second_per_grid", "times", "next_text"), [(1.0, [2, 4, 6, 8], 9), (0.5, [2, 3, 4, 5], 6), (0.25, [2, 2, 3, 3], 4)]
)
def test_golden_values(second_per_grid: float, times: list[int], next_text: int) -> None:
    ids = prompt_positions(prompt(2, 16, 3), VIDEO, Grid(4, 4, 4, second_per_grid))
    assert ids[:, :2].tolist() == [[0, 1]] * 3
    assert ids[0, 2:18].tolist() == [time for time in times for _ in range(4)]
    assert ids[1, 2:18].tolist() == [2, 2, 3, 3] * 4
    assert ids[2, 2:18].tolist() == [2, 3, 2, 3] * 4
    assert ids[:, 18:].tolist() == [[next_text, next_text + 1, next_text + 2]] * 3


def test_text_goes_on_past_the_rows_when_the_video_is_short() -> None:
    ids = prompt_positions(prompt(1, 9, 1), VIDEO, Grid(1, 6, 6, 0.5))
    assert ids[:, -1].tolist() == [4, 4, 4]


def test_fractions_of_a_position_are_dropped() -> None:
    ids = video_positions(0, Grid(5, 2, 2, 0.7))
    assert ids[0].tolist() == [0, 1, 2, 4, 5]
