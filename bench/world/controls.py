"""Videos that do not show what is asked about, though all else is right."""

import dataclasses

from bench.world.sample import Sample, asked_things
from bench.world.scenes import Scene, Thing, World


def without_asked_scenes(sample: Sample) -> World | None:
    """The video with the scenes of everything asked about cut out; None if too little is left of it."""
    asked = asked_things(sample)
    kept = [scene for scene in sample.world.scenes if not any(_shows(scene, thing) for thing in asked)]
    scenes: list[Scene] = []
    things: list[Thing] = []
    at = 0
    for scene in kept:
        shift = at - scene.first_pair
        scenes.append(dataclasses.replace(scene, first_pair=at, end_pair=scene.end_pair + shift))
        at = scenes[-1].end_pair
        things += [_moved(thing, shift) for thing in sample.world.things if _shows(scene, thing)]
    if not things:
        return None
    return World(sample.world.seed, at, tuple(scenes), tuple(things))


def _shows(scene: Scene, thing: Thing) -> bool:
    return scene.first_pair <= thing.first_pair < scene.end_pair


def _moved(thing: Thing, shift: int) -> Thing:
    turns_pair = None if thing.turns_pair is None else thing.turns_pair + shift
    return dataclasses.replace(
        thing, first_pair=thing.first_pair + shift, end_pair=thing.end_pair + shift, turns_pair=turns_pair
    )
