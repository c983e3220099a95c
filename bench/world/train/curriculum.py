"""What the language stage sees as it goes on: longer videos, more scenes, more things, briefer ones."""

import random
from dataclasses import dataclass

from bench.world.questions import ASKERS
from bench.world.sample import Sample
from bench.world.scenes import Plan, World, sample_world
from bench.world.splits import TRAIN

INTERVALS = (1, 1, 1, 2, 2, 4, 8)  # temporal positions between frame pairs
MAX_CAPTIONED = 4  # things
TOKENS_PER_STEP = 3200
TEXT_TOKENS_PER_VIDEO = 400


@dataclass(frozen=True)
class Stage:
    until: float  # share of the budget
    num_pairs: tuple[int, ...]
    max_things: int
    max_scenes: int
    brief_share: float


STAGES = (
    Stage(0.06, (2, 2, 3), 2, 1, 0.0),
    Stage(0.16, (2, 3, 4, 6), 3, 1, 0.2),
    Stage(0.35, (3, 4, 6, 8, 12), 4, 2, 0.4),
    Stage(0.75, (4, 8, 8, 12, 16, 24), 4, 4, 0.5),
    Stage(0.88, (4, 6, 8, 12, 16, 24, 32, 48, 64), 4, 6, 0.5),
    Stage(1.00, (4, 6, 8, 12, 16, 24, 32, 48, 48, 64, 96, 96, 200), 4, 6, 0.5),
)


@dataclass(frozen=True)
class Lesson:
    """What one training step is made of."""

    num_pairs: int
    interval: int
    worlds: tuple[World, ...]


def lesson(rng: random.Random, progress: float) -> Lesson:
    stage = next(stage for stage in STAGES if progress <= stage.until)
    num_pairs = rng.choice(stage.num_pairs)
    num_rows = max(1, round(TOKENS_PER_STEP / (num_pairs * 9 + TEXT_TOKENS_PER_VIDEO)))
    worlds = tuple(
        sample_world(rng.randrange(TRAIN.start, TRAIN.stop), _plan(rng, stage, num_pairs)) for _ in range(num_rows)
    )
    return Lesson(num_pairs, rng.choice(INTERVALS), worlds)


def _plan(rng: random.Random, stage: Stage, num_pairs: int) -> Plan:
    crowded = stage.max_things == MAX_CAPTIONED and rng.random() < 0.3
    return Plan(
        num_pairs,
        max_things=6 if crowded else stage.max_things,
        max_scenes=stage.max_scenes,
        min_scenes=stage.max_scenes if rng.random() < 0.7 else 1,
        brief_share=stage.brief_share,
    )


def samples(rng: random.Random, world: World) -> list[Sample]:
    """Questions about one video, in random order; a crowded one is described more often instead of captioned."""
    captioned = len(world.things) <= MAX_CAPTIONED
    kinds = ["caption"] * captioned + ["describe"] * (3 if captioned else 5) + ["question"] * 4
    if rng.random() < 0.5:
        kinds.append("multiple_choice")
    out = [ASKERS[kind](rng, world) for kind in kinds]
    rng.shuffle(out)
    return out
