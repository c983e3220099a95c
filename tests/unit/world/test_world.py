import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.world import HELD_OUT, KINDS, TRAIN, VALIDATION, asked_cells, asked_things, held_out, validation
from bench.world.__main__ import show
from bench.world.draw import draw
from bench.world.sample import thing_events
from bench.world.scenes import Plan, World, sample_world


@pytest.fixture(params=range(20))
def world(request: pytest.FixtureRequest) -> World:
    return sample_world(request.param, Plan(24, max_things=6))


def test_scenes_cover_the_video_without_gaps(world: World) -> None:
    edges = [(scene.first_pair, scene.end_pair) for scene in world.scenes]
    assert edges[0][0] == 0
    assert edges[-1][1] == world.num_frame_pairs
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert all(first < end for first, end in edges)


def test_things_have_unique_colours_in_canonical_order_and_stay_in_their_scene(world: World) -> None:
    from bench.world.facts import COLORS

    order = [COLORS.index(thing.color) for thing in world.things]
    assert order == sorted(set(order))
    for thing in world.things:
        home = [
            scene for scene in world.scenes if scene.first_pair <= thing.first_pair and thing.end_pair <= scene.end_pair
        ]
        assert [scene.background for scene in home] == [thing.background]


def test_brief_things_are_visible_for_two_to_four_pairs(world: World) -> None:
    assert all(2 <= thing.end_pair - thing.first_pair <= 4 for thing in world.things if thing.brief)


def test_splits_do_not_meet() -> None:
    ranges = sorted((TRAIN, VALIDATION, HELD_OUT), key=lambda split: split.start)
    assert all(before.stop <= after.start for before, after in itertools.pairwise(ranges))
    for kind in KINDS:
        for index in (0, 1, 999_999):
            assert validation(kind, index, num_frame_pairs=4).seed in VALIDATION
            assert held_out(kind, index, num_frame_pairs=4).seed in HELD_OUT


def test_samples_of_different_kinds_and_indices_have_different_seeds() -> None:
    seeds = [held_out(kind, index, num_frame_pairs=4).seed for kind in KINDS for index in range(50)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_deterministic(kind: str) -> None:
    first, second = (held_out(kind, 7, num_frame_pairs=12) for _ in range(2))
    assert first == second
    assert np.array_equal(draw(first.world), draw(second.world))


@pytest.mark.parametrize("brief", [True, False])
def test_brief_says_whether_everything_asked_about_is_brief(brief: bool) -> None:
    samples = [held_out("describe", index, num_frame_pairs=48, brief=brief) for index in range(50)]
    assert all(sample.brief is brief for sample in samples)


def test_drawing_in_pieces_equals_drawing_at_once(world: World) -> None:
    pieces = [draw(world, first_frame=first, end_frame=first + 16) for first in (0, 16, 32)]
    assert np.array_equal(np.concatenate(pieces), draw(world))


def test_asked_cells_are_where_the_frames_change_when_the_asked_things_go() -> None:
    for index in range(20):
        sample = held_out("describe", index, num_frame_pairs=16, brief=True)
        asked = asked_things(sample)
        others = tuple(thing for thing in sample.world.things if thing not in asked)
        without = draw(dataclasses.replace(sample.world, things=others)).astype(int)
        changed = np.abs(draw(sample.world).astype(int) - without).sum(-1) > 30  # [frames, 48, 48]
        pixels = changed.reshape(16, 2, 3, 16, 3, 16).sum((1, 3, 5)).reshape(16, 9)
        cells = asked_cells(sample)
        assert cells.any()
        assert not cells[pixels == 0].all() or len(others)
        assert cells[pixels > 40].all()


def test_asked_cells_of_a_caption_cover_all_things() -> None:
    sample = held_out("caption", 3, num_frame_pairs=16)
    pairs = {pair for thing in sample.world.things for pair in range(thing.first_pair, thing.end_pair)}
    assert set(np.flatnonzero(asked_cells(sample).any(1))) == pairs


def test_a_good_part_of_a_video_is_empty() -> None:
    worlds = [held_out("caption", index, num_frame_pairs=48).world for index in range(60)]
    shown = [
        sum(any(thing.first_pair <= pair < thing.end_pair for thing in world.things) for pair in range(48))
        for world in worlds
    ]
    assert 0.25 < 1 - sum(shown) / (48 * len(worlds)) < 0.8


def test_turning_changes_nothing_else() -> None:
    for seed in range(60):
        plain, turning = sample_world(seed, Plan(24)), sample_world(seed, Plan(24, turning_share=0.5))
        bare = [dataclasses.replace(thing, turns_to=None, turns_pair=None) for thing in turning.things]
        assert tuple(bare) == plain.things
        colors = [color for thing in turning.things for color in (thing.color, thing.turns_to) if color]
        assert len(set(colors)) == len(colors)
        for thing in turning.things:
            if thing.turns_pair is not None:
                assert thing.first_pair + 2 <= thing.turns_pair <= thing.end_pair - 2


def test_events_are_told_in_order() -> None:
    for seed in range(200):
        world = sample_world(seed, Plan(12, turning_share=0.5))
        for thing in world.things:
            events = [fact.value for fact in thing_events(world, thing)]
            assert ("appears" in events) == (thing.first_pair > 0)
            assert ("disappears" in events) == (thing.end_pair < 12)
            assert events == sorted(events, key=lambda event: {"appears": 0, "disappears": 2}.get(event, 1))


def test_a_contact_sheet_shows_scenes_times_and_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    show(5, Plan(20, turning_share=1.0), out)
    sheet = Image.open(out)
    assert sheet.width > 800
    assert len(set(sheet.convert("RGB").get_flattened_data())) > 50
    told = capsys.readouterr().out
    for thing in sample_world(5, Plan(20, turning_share=1.0)).things:
        assert f"{thing.size} {thing.color} {thing.shape}" in told
