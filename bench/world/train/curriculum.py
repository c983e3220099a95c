"""What the language stage sees as it goes on: longer videos, more scenes, more things, briefer ones."""

import math
import random
from dataclasses import dataclass

from bench.world.questions import ASKERS, ask_background, ask_chain
from bench.world.sample import Sample
from bench.world.scenes import Plan, World, sample_world
from bench.world.splits import TRAIN

MAX_CAPTIONED = 4  # things
TOKENS_PER_STEP = 3200
TEXT_TOKENS_PER_VIDEO = 400
MAX_TIME_SPAN = 9000  # temporal positions of the longest video; 64k visual tokens at 4 frames a second span 7,282
WIDE_SHARE = 0.4  # of lessons, whose temporal positions are spread widely: long spans are learned on short videos
LONG_FROM = 0.45  # share of the budget after which some lessons are about long videos
LONG_SHARE = 0.10
LONG_PAIRS = (200, 600)
VERY_LONG_SHARE = 0.01
VERY_LONG_PAIRS = (1000, 1900)


@dataclass(frozen=True)
class Stage:
    until: float  # share of the budget
    num_pairs: tuple[int, ...]
    max_things: int
    max_scenes: int
    brief_share: float


STAGES = (
    Stage(0.06, (2, 2, 3), 2, 2, 0.0),
    Stage(0.16, (2, 3, 4, 6), 3, 3, 0.2),
    Stage(0.35, (3, 4, 6, 8, 12), 4, 4, 0.4),
    Stage(0.65, (4, 8, 8, 12, 16, 24), 4, 6, 0.5),
    Stage(1.00, (4, 6, 8, 12, 16, 24, 32, 48, 64, 96), 4, 6, 0.5),
)


@dataclass(frozen=True)
class Lesson:
    """What one training step is made of."""

    num_pairs: int
    interval: float  # temporal positions between frame pairs
    worlds: tuple[World, ...]
    is_long: bool  # too long to learn to see from: only the text is trained


def lesson(
    rng: random.Random, progress: float, *, usual_intervals: tuple[int, ...], turning_share: float = 0.0
) -> Lesson:
    """usual_intervals: temporal positions between frame pairs that the model meets in use, as often as named."""
    stage = next(stage for stage in STAGES if progress <= stage.until)
    roll = rng.random() if progress > LONG_FROM else 1.0
    if roll < LONG_SHARE:
        num_pairs = round(_log_uniform(rng, *(VERY_LONG_PAIRS if roll < VERY_LONG_SHARE else LONG_PAIRS)))
        num_rows = 1
    else:
        num_pairs = rng.choice(stage.num_pairs)
        num_rows = max(1, round(TOKENS_PER_STEP / (num_pairs * 9 + TEXT_TOKENS_PER_VIDEO)))
    worlds = tuple(
        sample_world(rng.randrange(TRAIN.start, TRAIN.stop), _plan(rng, stage, num_pairs, turning_share))
        for _ in range(num_rows)
    )
    return Lesson(num_pairs, _interval(rng, num_pairs, usual_intervals), worlds, roll < LONG_SHARE)


def _interval(rng: random.Random, num_pairs: int, usual: tuple[int, ...]) -> float:
    if rng.random() < WIDE_SHARE:
        return _log_uniform(rng, 1, MAX_TIME_SPAN / num_pairs)
    return rng.choice(usual)


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _plan(rng: random.Random, stage: Stage, num_pairs: int, turning_share: float) -> Plan:
    crowded = stage.max_things == MAX_CAPTIONED and rng.random() < 0.3
    return Plan(
        num_pairs,
        max_things=6 if crowded else stage.max_things,
        max_scenes=stage.max_scenes,
        min_scenes=stage.max_scenes if rng.random() < 0.7 else 1,
        min_scene_pairs=1 if num_pairs < 8 else 2 if num_pairs < 16 else 4,
        brief_share=stage.brief_share,
        turning_share=turning_share,
    )


def samples(
    rng: random.Random, world: World, *, with_events: bool = False, is_finishing: bool = False
) -> list[list[Sample]]:
    """Conversations about one video, in random order; a crowded one is described more often instead of captioned.

    is_finishing: more of the whole, fewer choices
    """
    captioned = len(world.things) <= MAX_CAPTIONED
    kinds = ["caption"] * captioned + ["describe"] * (1 if captioned else 3) + ["question"] * 4
    kinds += ["caption" if captioned else "describe", "describe"] * is_finishing
    kinds += ["multiple_choice"] * (4 if is_finishing else 6) + ["yes_no"] * 5 + ["explained"]
    kinds += ["event"] * (2 * with_events)
    out = [ASKERS[kind](rng, world) for kind in kinds] + [ask_background(rng, world) for _ in range(2)]
    rng.shuffle(out)
    return [*conversations(rng, out), ask_chain(rng, world)]


def conversations(rng: random.Random, samples: list[Sample], *, share_single: float = 0.75) -> list[list[Sample]]:
    """Group questions into conversations of one to three turns."""
    out: list[list[Sample]] = []
    left = list(samples)
    while left:
        num_turns = 1 if rng.random() < share_single else rng.choice((2, 3))
        out.append(left[:num_turns])
        left = left[num_turns:]
    return out
