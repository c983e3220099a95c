import dataclasses
import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from bench.world import HELD_OUT, TRAIN, VALIDATION, Plan, World, sample_world
from bench.world.facts import COLORS
from bench.world.families import FAMILIES, WorldFamily, family_of
from bench.world.model import MODEL_SIZES
from bench.world.scenes import center
from bench.world.tokenizer import build_tokenizer
from bench.world.train import curriculum, language, vision
from bench.world.train.branches import BranchPacker
from bench.world.train.curriculum import STAGES, Lesson, lesson, samples
from bench.world.train.language import Settings, make_batch, save_checkpoint, train_language
from bench.world.train.learner import Learner
from bench.world.train.pixels import (
    LABEL_CLASSES,
    UNLABELLED,
    cell_labels,
    cell_places,
    without_first_motion,
)
from bench.world.train.plot import plot_curve, read_curve
from bench.world.train.recipes import RECIPES, make
from bench.world.train.run import Run, Schedule, cosine
from bench.world.train.vision import train_vision

QWEN25 = FAMILIES["qwen2_5_vl"]


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    first = Run(tmp_path, schedule=Schedule(), seed=3)
    layer = torch.nn.Linear(2, 2)
    first.start()
    first.rng.random()
    first.step, first.num_videos = 5, 40
    first.save({"layer": layer})
    expected = first.rng.random(), torch.rand(1)

    second, other = Run(tmp_path, schedule=Schedule(), seed=4), torch.nn.Linear(2, 2)
    assert second.resume({"layer": other})
    assert (second.step, second.num_videos) == (5, 40)
    assert (second.rng.random(), torch.rand(1)) == expected
    assert torch.equal(layer.weight, other.weight)
    second.log(loss=0.5)
    assert json.loads((tmp_path / "curve.jsonl").read_text())["loss"] == 0.5


def test_a_new_run_has_nothing_to_resume(tmp_path: Path) -> None:
    assert not Run(tmp_path, schedule=Schedule(), seed=0).resume({})


def test_the_rate_warms_up_and_reaches_its_floor_at_the_deadline() -> None:
    assert cosine(0.0, step=0, warmup_steps=10) == pytest.approx(0.1)
    assert cosine(0.0, step=10, warmup_steps=10) == pytest.approx(1.0)
    assert cosine(1.0, step=1000, warmup_steps=10, floor=0.03) == pytest.approx(0.03)


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.3, 0.44, 0.7, 1.0])
def test_lessons_keep_to_their_stage(progress: float) -> None:
    rng = random.Random(0)
    stage = next(stage for stage in STAGES if progress <= stage.until)
    for _ in range(12):
        now = lesson(rng, progress, usual_intervals=(1, 2))
        assert now.is_long or now.num_pairs in stage.num_pairs
        assert now.interval >= 1
        for world in now.worlds[: 0 if now.is_long else 2]:
            labels = cell_labels(world)
            assert ((labels == UNLABELLED) | (labels < torch.tensor(LABEL_CLASSES).numpy())).all()


def test_late_lessons_are_also_about_long_videos_and_wide_spans() -> None:
    rng = random.Random(1)
    lessons = [lesson(rng, 0.9, usual_intervals=(1,)) for _ in range(120)]
    longest = [now for now in lessons if now.is_long]
    assert 4 <= len(longest) <= 25
    assert all(len(now.worlds) == 1 and now.num_pairs >= 200 for now in longest)
    assert max(now.num_pairs * now.interval for now in lessons if not now.is_long) > 2000


def test_conversations_hold_every_kind_and_chains_that_say_it() -> None:
    rng = random.Random(2)
    seen: Counter[str] = Counter()
    for seed in range(40):
        world = sample_world(seed, Plan(12, max_things=6, turning_share=0.3))
        turns = samples(rng, world, with_events=True)
        assert all(1 <= len(conversation) <= 3 for conversation in turns)
        chain = turns[-1]
        assert len(chain) >= 2
        assert all(re.search(r"\bit\b", turn.question) for turn in chain[1:])
        assert not re.search(r"\bit\b", chain[0].question)
        assert len({turn.key[0].color for turn in chain}) == 1
        for turn in itertools.chain.from_iterable(turns):
            seen[turn.kind] += 1
            seen.update({f"asks {fact.kind}": 1 for fact in turn.key})
    kinds = {"caption", "describe", "question", "multiple_choice", "explained", "event"}
    asked = {"asks order", "asks yes_no", "asks count", "asks background", "asks choice", "asks turns"}
    assert kinds | asked <= set(seen)


def test_without_events_nothing_turns_and_nobody_asks() -> None:
    rng = random.Random(3)
    for _ in range(10):
        for world in lesson(rng, 0.4, usual_intervals=(1,)).worlds:
            assert not any(thing.turns_to for thing in world.things)
            assert not any(turn.kind == "event" for turns in samples(rng, world) for turn in turns)


def test_no_seed_of_another_split_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every world that either stage draws comes through `sample_world`; so watch what it is asked for."""
    drawn: list[int] = []

    def watched(seed: int, plan: Plan) -> World:
        drawn.append(seed)
        return sample_world(seed, plan)

    monkeypatch.setattr(curriculum, "sample_world", watched)
    monkeypatch.setattr(vision, "sample_world", watched)
    rng = random.Random(4)
    for step in range(300):
        lesson(rng, step / 300, usual_intervals=(1,))
    run = Run(tmp_path, schedule=Schedule(1), seed=5)
    for family in FAMILIES.values():
        vision.make_batch(run, family)
    assert len(drawn) > 1000
    assert all(seed in TRAIN for seed in drawn)
    assert not any(seed in VALIDATION or seed in HELD_OUT for seed in drawn)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_tower_learns_from_labels_and_a_teacher(family: WorldFamily, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    save_checkpoint(QWEN25.build_model(MODEL_SIZES["drafter"]), QWEN25.build_processor(), teacher)
    settings = {"config": "drafter", "teacher": teacher, "seed": 1, "device": "cpu"}
    train_vision(tmp_path / "run", family, schedule=Schedule(2), **settings)
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    assert state["step"] == 2
    learner = Learner(family, config="drafter", init=teacher, vision=tmp_path / "run", device="cpu")
    for name, value in family.vision_parts(learner.model).state_dict().items():
        assert torch.equal(value, state["visual"][name])
    taught = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32).model.language_model.state_dict()
    for name, value in learner.model.model.language_model.state_dict().items():
        # a family whose text model compares frames has learned to in the vision stage, in its first layer
        assert torch.equal(value, taught[name]) == (family.sees_motion or "layers.0." not in name), name


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_step_of_the_language_stage_lowers_the_loss(
    family: WorldFamily, is_long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = tuple(sample_world(seed, Plan(4)) for seed in range(1 if is_long else 2))
    now = Lesson(4, 1.0, worlds, is_long)
    monkeypatch.setattr(language, "lesson", lambda *_, **__: now)
    run = Run(tmp_path, schedule=Schedule(10), seed=1)
    settings = Settings(config="drafter")
    packer = BranchPacker(build_tokenizer(), family)
    batch = make_batch(run, packer, family, settings)
    learner = Learner(family, config="drafter", init=None, vision=None, device="cpu")
    learner.set_rate(1.0)
    losses = []
    for _ in range(6):
        _, of_answers, of_labels, of_words = learner.forward(batch)
        loss = of_answers.mean() + of_labels + 0.1 * of_words
        losses.append(float(loss.detach()))
        learner.learn(loss)
    assert losses[-1] < 0.9 * losses[0]


def test_a_long_row_is_answered_as_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same row with the prefix prefilled first gives the same losses."""
    now = Lesson(4, 1.0, (sample_world(1, Plan(4)),), False)
    monkeypatch.setattr(language, "lesson", lambda *_, **__: now)
    packer = BranchPacker(build_tokenizer(), QWEN25)
    learner = Learner(QWEN25, config="drafter", init=None, vision=None, device="cpu")
    batch = make_batch(Run(tmp_path, schedule=Schedule(1), seed=1), packer, QWEN25, Settings(config="drafter"))
    _, short, _, _ = learner.forward(batch)
    _, long, _, _ = learner.forward(dataclasses.replace(batch, is_long=True))
    torch.testing.assert_close(short, long, atol=1e-4, rtol=1e-4)


def test_states_of_cells_learn_to_say_what_the_cells_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = Lesson(4, 1.0, (sample_world(1, Plan(4)), sample_world(2, Plan(4))), False)
    monkeypatch.setattr(language, "lesson", lambda *_, **__: now)
    batch = make_batch(
        Run(tmp_path, schedule=Schedule(1), seed=1),
        BranchPacker(build_tokenizer(), QWEN25),
        QWEN25,
        Settings(config="drafter"),
    )
    learner = Learner(QWEN25, config="drafter", init=None, vision=None, device="cpu")
    learner.set_rate(1.0)
    losses = []
    for _ in range(25):
        *_, of_words = learner.forward(batch)
        losses.append(float(of_words.detach()))
        learner.learn(of_words)
    # five words, all alike, cost log 5 at best
    assert losses[-1] < 0.5 * losses[0]
    assert losses[-1] > np.log(5)


def test_a_finishing_run_is_told_more_of_the_whole() -> None:
    rng = random.Random(6)
    world = sample_world(3, Plan(12))
    counts = []
    for is_finishing in (False, True):
        counts.append(Counter(turn.kind for turns in samples(rng, world, is_finishing=is_finishing) for turn in turns))
    early, late = counts
    assert late["caption"] > early["caption"]
    assert late["multiple_choice"] < early["multiple_choice"]


def test_a_whole_run_validates_saves_and_is_drawn(tmp_path: Path) -> None:
    settings = Settings(config="drafter", compiled=False, validate_every=1, num_validated=1)
    train_language(tmp_path, QWEN25, settings, checkpoint=tmp_path / "model", schedule=Schedule(1), seed=1)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    series = read_curve(tmp_path / "curve.jsonl")
    assert {f"validation {name}" for name in ("caption", "question", "multiple_choice", "yes_no")} <= set(series)
    plot_curve(tmp_path / "curve.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_places_and_first_motions() -> None:
    world = sample_world(3, Plan(6, max_things=1, max_scenes=1, brief_share=1.0))
    (thing,) = world.things
    labels, places = cell_labels(world), cell_places(world)
    known = labels[:, :, 0] == COLORS.index(thing.color)
    assert (~np.isnan(places).any(-1) == known).all()
    for pair, cell in np.argwhere(known):
        cosine_x, sine_x, cosine_y, sine_y = places[pair, cell]
        x, y = (np.arctan2([sine_x, sine_y], [cosine_x, cosine_y]) / (2 * np.pi) * 48) % 48
        assert (x, y) == pytest.approx(center(thing, 2 * pair), abs=1e-3)
    later = without_first_motion(world, labels)
    assert (later[thing.first_pair, :, 3] == UNLABELLED).all()
    assert (later[thing.first_pair + 1 :] == labels[thing.first_pair + 1 :]).all()


def test_cells_of_a_thing_that_turns_show_its_new_colour() -> None:
    worlds = (sample_world(seed, Plan(12, turning_share=1.0)) for seed in range(99))
    world = next(world for world in worlds if world.things[0].turns_to)
    thing = world.things[0]
    assert thing.turns_pair is not None
    assert thing.turns_to is not None
    labels = cell_labels(dataclasses.replace(world, things=(thing,)))[:, :, 0]
    shown = [set(labels[pair][labels[pair] >= 0]) - {len(COLORS)} for pair in (thing.turns_pair - 1, thing.turns_pair)]
    assert shown == [{COLORS.index(thing.color)}, {COLORS.index(thing.turns_to)}]


def test_a_recipe_is_made_stopped_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(
        QWEN25.build_model(MODEL_SIZES["drafter"]), QWEN25.build_processor(), tmp_path / "tiny-qwen2_5-vl-draft"
    )
    monkeypatch.setattr(Learner, "compile", lambda self: None)

    def made(language_steps: int) -> dict[str, float]:
        make(
            "tiny-llava-onevision-draft",
            tmp_path,
            tmp_path / "model",
            device="cpu",
            vision_steps=1,
            language_steps=language_steps,
            checkpoints=tmp_path,
        )
        state: dict[str, float] = torch.load(tmp_path / "tiny-llava-onevision-draft" / "state.pt", weights_only=True)
        return state

    assert made(1)["step"] == 1
    assert made(2)["step"] == 2
    assert family_of(tmp_path / "model").name == "llava_onevision"


def test_recipes_start_from_checkpoints_of_their_size() -> None:
    for name, recipe in RECIPES.items():
        if recipe.teacher:
            assert RECIPES[recipe.teacher].config == recipe.config
            assert RECIPES[recipe.teacher].teacher is None
        assert name.endswith("-draft") == (recipe.config == "drafter")
    assert len({recipe.seed for recipe in RECIPES.values()}) == len(RECIPES)
