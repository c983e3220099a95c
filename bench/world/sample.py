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

    kind: a kind of fact word ("color", "shape", "size", "motion", "background", "count"); "turns", whose value is the
        colour that the thing turns to; "event"; "order", whose value is the colour that is first; "yes_no"; "choice"
    color: the named thing it is about, None if it is about the whole video
    """

    kind: str
    color: str | None
    value: str


@dataclass(frozen=True)
class Sample:
    seed: int
    kind: str  # "caption", "describe", "question", "multiple_choice" or "event"
    question: str
    answer: str
    key: tuple[Fact, ...]
    brief: bool  # everything asked about is visible for two to four frame pairs only
    world: World


LOOKS = ("color", "size", "shape", "motion")


def thing_facts(thing: Thing, kinds: tuple[str, ...] = (*LOOKS, "background")) -> tuple[Fact, ...]:
    """A thing's facts in canonical order; its turning, where it turns, is one of them."""
    facts = tuple(Fact(kind, thing.color, getattr(thing, kind)) for kind in kinds)
    return (*facts, Fact("turns", thing.color, thing.turns_to)) if thing.turns_to else facts


def thing_events(world: World, thing: Thing) -> tuple[Fact, ...]:
    """What happens to a thing, in the order in which it happens."""
    events = [Fact("event", thing.color, "appears")] if thing.first_pair > 0 else []
    if thing.turns_to:
        events.append(Fact("turns", thing.color, thing.turns_to))
    if thing.end_pair < world.num_frame_pairs:
        events.append(Fact("event", thing.color, "disappears"))
    return tuple(events) or (Fact("event", thing.color, "stays"),)


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
