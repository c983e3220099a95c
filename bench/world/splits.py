"""Which seeds belong to which split. The ranges do not meet, so no world is in two splits."""

import random

from bench.world.questions import ASKERS
from bench.world.sample import Sample
from bench.world.scenes import Plan, sample_world

TRAIN = range(0, 1_000_000_000)
VALIDATION = range(1_000_000_000, 1_100_000_000)
HELD_OUT = range(1_100_000_000, 1_200_000_000)

KINDS = tuple(ASKERS)
SEEDS_PER_INDEX = 16  # more than there are kinds, so that a new kind does not change the samples of the others
TURNING_SHARE = {"event": 0.4}  # elsewhere things keep their colours
MAX_THINGS = {"event": 6, "caption": 4, "describe": 6, "question": 6, "multiple_choice": 6, "yes_no": 6, "explained": 6}


def held_out(kind: str, index: int, *, num_frame_pairs: int, brief: bool | None = None) -> Sample:
    """A sample for reporting: never used to train or to choose.

    brief: True: everything asked about is visible for two to four frame pairs; False: for most of its scene;
    None: the mixture trained on
    """
    return _sample(HELD_OUT, kind, index, num_frame_pairs, brief)


def validation(kind: str, index: int, *, num_frame_pairs: int, brief: bool | None = None) -> Sample:
    """Like `held_out`, for choosing thresholds and settings."""
    return _sample(VALIDATION, kind, index, num_frame_pairs, brief)


def _sample(split: range, kind: str, index: int, num_frame_pairs: int, brief: bool | None) -> Sample:
    seed = split[index * SEEDS_PER_INDEX + KINDS.index(kind)]
    share = 0.5 if brief is None else float(brief)
    plan = Plan(
        num_frame_pairs,
        max_things=MAX_THINGS[kind],
        brief_share=share,
        turning_share=TURNING_SHARE.get(kind, 0.0),
    )
    world = sample_world(seed, plan)
    return ASKERS[kind](random.Random(f"{seed} {kind}"), world)
