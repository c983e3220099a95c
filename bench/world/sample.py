"""A question about a world, with the facts that a right answer states."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.world.draw import visible_cells
from bench.world.facts import CELLS
from bench.world.scenes import Thing, World


@dataclass(frozen=True)
class Fact:
    """One thing that a right answer says.

    kind: a kind of fact word ("color", "shape", "size", "motion", "background", "count"), "yes_no" or "choice"
    color: the named thing it is about, None if it is about the whole video
    """

    kind: str
    color: str | None
    value: str


@dataclass(frozen=True)
class Sample:
    seed: int
    kind: str  # "caption", "describe", "question" or "multiple_choice"
    question: str
    answer: str
    key: tuple[Fact, ...]
    brief: bool  # everything asked about is visible for two to four frame pairs only
    world: World


LOOKS = ("color", "size", "shape", "motion")


def thing_facts(thing: Thing, kinds: tuple[str, ...] = (*LOOKS, "background")) -> tuple[Fact, ...]:
    return tuple(Fact(kind, thing.color, getattr(thing, kind)) for kind in kinds)


def asked_things(sample: Sample) -> tuple[Thing, ...]:
    """The things asked about: the named ones that exist, or all where the whole video is asked about."""
    colors = {fact.color for fact in sample.key}
    if None in colors:
        return sample.world.things
    return tuple(thing for thing in sample.world.things if thing.color in colors)


def asked_cells(sample: Sample) -> NDArray[np.bool_]:
    """Visual tokens that show something asked about: [num_frame_pairs, 9]."""
    cells = np.zeros((sample.world.num_frame_pairs, CELLS), np.bool_)
    for thing in asked_things(sample):
        cells |= visible_cells(sample.world, thing)
    return cells
