"""What the language stage sees as it goes on: longer videos, more scenes, more things, briefer ones."""

import random
from dataclasses import dataclass

from bench.world.questions import ASKERS, ask_background
from bench.world.sample import Sample
from bench.world.scenes import Plan, World, sample_world
from bench.world.splits import TRAIN

INTERVALS = (1, 1, 1, 2, 2, 4, 8)  # temporal positions between frame pairs
MAX_CAPTIONED = 4  # things
APART_PAIRS = (8, 8, 12)
TOKENS_PER_STEP = 3200
TEXT_TOKENS_PER_VIDEO = 400


@dataclass(frozen=True)
class Stage:
    until: float  # share of the budget
    num_pairs: tuple[int, ...]
    max_things: int
    max_scenes: int
    brief_share: float
    apart_share: float = 0.0  # of lessons with each thing in a scene of its own


STAGES = (
    Stage(0.06, (2, 2, 3), 2, 1, 0.0),
    Stage(0.16, (2, 3, 4, 6), 3, 1, 0.2),
    Stage(0.35, (3, 4, 6, 8, 12), 4, 2, 0.4),
    Stage(0.75, (4, 8, 8, 12, 16, 24), 4, 4, 0.5, 0.65),
    Stage(0.88, (4, 6, 8, 12, 16, 24, 32, 48, 64), 4, 6, 0.5, 0.3),
    Stage(1.00, (4, 6, 8, 12, 16, 24, 32, 48, 48, 64, 96, 96, 200), 4, 6, 0.5, 0.1),
)


@dataclass(frozen=True)
class Lesson:
    """What one training step is made of."""

    num_pairs: int
    interval: int
    worlds: tuple[World, ...]


def lesson(rng: random.Random, progress: float) -> Lesson:
    stage = next(stage for stage in STAGES if progress <= stage.until)
    apart = rng.random() < stage.apart_share
    num_pairs = rng.choice(APART_PAIRS if apart else stage.num_pairs)
    num_rows = max(1, round(TOKENS_PER_STEP / (num_pairs * 9 + TEXT_TOKENS_PER_VIDEO)))
    worlds = []
    for _ in range(num_rows):
        plan = _apart_plan(num_pairs) if apart else _plan(rng, stage, num_pairs)
        worlds.append(sample_world(rng.randrange(TRAIN.start, TRAIN.stop), plan))
    return Lesson(num_pairs, rng.choice(INTERVALS), tuple(worlds))


def _plan(rng: random.Random, stage: Stage, num_pairs: int) -> Plan:
    crowded = stage.max_things == MAX_CAPTIONED and rng.random() < 0.3
    return Plan(
        num_pairs,
        max_things=6 if crowded else stage.max_things,
        max_scenes=stage.max_scenes,
        min_scenes=stage.max_scenes if rng.random() < 0.7 else 1,
        brief_share=stage.brief_share,
    )


def _apart_plan(num_pairs: int) -> Plan:
    """Two to four things, each in a short scene of its own: no background but the asked thing's answers."""
    return Plan(num_pairs, max_things=6, max_scenes=4, min_scenes=4, min_scene_pairs=2, max_together=1, brief_share=0.3)


def samples(rng: random.Random, world: World) -> list[Sample]:
    """Questions about one video, in random order; a crowded one is described more often instead of captioned."""
    captioned = len(world.things) <= MAX_CAPTIONED
    kinds = ["caption"] * captioned + ["describe"] * (3 if captioned else 5) + ["question"] * 4
    if rng.random() < 0.5:
        kinds.append("multiple_choice")
    out = [ASKERS[kind](rng, world) for kind in kinds]
    if len(world.scenes) > 1:
        out += [ask_background(rng, world) for _ in range(4)]
    rng.shuffle(out)
    return out
