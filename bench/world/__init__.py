"""A procedurally drawn video world with known facts: videos, questions about them, and an exact score of answers."""

from bench.world.mp4 import iterate_mp4, read_mp4, write_mp4
from bench.world.sample import Fact, Sample, asked_cells, asked_things
from bench.world.scenes import Plan, Scene, Thing, World, sample_world
from bench.world.scoring import facts, score
from bench.world.splits import HELD_OUT, KINDS, TRAIN, VALIDATION, held_out, validation

__all__ = [
    "HELD_OUT",
    "KINDS",
    "TRAIN",
    "VALIDATION",
    "Fact",
    "Plan",
    "Sample",
    "Scene",
    "Thing",
    "World",
    "asked_cells",
    "asked_things",
    "facts",
    "held_out",
    "iterate_mp4",
    "read_mp4",
    "sample_world",
    "score",
    "validation",
    "write_mp4",
]
