"""Worlds: scenes with cuts and empty stretches, in which things of unique colours are visible for a while."""

import dataclasses
import itertools
import math
import random
from dataclasses import dataclass

from bench.world.facts import BACKGROUNDS, COLORS, FRAME_SIZE, MOTIONS, RADIUS, SHAPES, SIZES, Rgb

BRIEF_PAIRS = (2, 3, 4)  # how long a brief thing is visible
MIN_PAIRS_OF_A_COLOR = 2
PLACING_TRIES = 12
UNIT_STEP = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}


@dataclass(frozen=True)
class Thing:
    color: str
    shape: str
    size: str
    motion: str
    background: str  # of the scene the thing is in
    x: float  # centre at the first visible frame, in model pixels
    y: float
    radius: float  # in model pixels
    speed: float  # model pixels per frame
    tint: Rgb  # offset from the pure colour
    first_pair: int
    end_pair: int  # one past the last visible frame pair
    brief: bool
    turns_to: str | None = None  # the colour it has from turns_pair on
    turns_pair: int | None = None

    def velocity(self) -> tuple[float, float]:
        dx, dy = UNIT_STEP[self.motion]
        return dx * self.speed, dy * self.speed


@dataclass(frozen=True)
class Scene:
    background: str
    tint: Rgb
    first_pair: int
    end_pair: int


@dataclass(frozen=True)
class World:
    """A video's whole truth. `things` are in canonical order: by colour index."""

    seed: int
    num_frame_pairs: int
    scenes: tuple[Scene, ...]
    things: tuple[Thing, ...]

    def thing(self, color: str) -> Thing:
        return next(thing for thing in self.things if thing.color == color)


@dataclass(frozen=True)
class Plan:
    """What kind of world to draw."""

    num_frame_pairs: int
    max_things: int = 4
    max_scenes: int = 6
    min_scenes: int = 1
    min_scene_pairs: int = 4
    max_together: int = 2  # things sharing one scene
    brief_share: float = 0.5
    turning_share: float = 0.0  # of the things visible for long enough: those that turn to another colour


def sample_world(seed: int, plan: Plan) -> World:
    rng = random.Random(seed)
    scenes = _sample_scenes(rng, plan)
    capacity = plan.max_together * len(scenes)
    num_things = min(_sample_num_things(rng, plan.max_things), capacity)
    slots = rng.sample([scene for scene in scenes for _ in range(plan.max_together)], num_things)
    things: list[Thing] = []
    for color, scene in zip(sorted(rng.sample(COLORS, num_things), key=COLORS.index), slots, strict=True):
        things.append(_sample_thing(rng, color, scene, plan.brief_share, things))
    if plan.turning_share:
        things = _some_turn(rng, things, plan.turning_share)
    return World(seed, plan.num_frame_pairs, tuple(scenes), tuple(things))


def _some_turn(rng: random.Random, things: list[Thing], share: float) -> list[Thing]:
    """Every colour of a video, old or new, belongs to one thing."""
    unused = [color for color in COLORS if color not in {thing.color for thing in things}]
    rng.shuffle(unused)
    out = []
    for thing in things:
        latest = thing.end_pair - MIN_PAIRS_OF_A_COLOR
        earliest = thing.first_pair + MIN_PAIRS_OF_A_COLOR
        if unused and earliest <= latest and rng.random() < share:
            thing = dataclasses.replace(thing, turns_to=unused.pop(), turns_pair=rng.randint(earliest, latest))
        out.append(thing)
    return out


def _sample_num_things(rng: random.Random, max_things: int) -> int:
    if max_things <= 4:
        return rng.choices((1, 2, 3, 4)[:max_things], (0.35, 0.40, 0.18, 0.07)[:max_things])[0]
    return rng.randint(2, max_things)


def _sample_scenes(rng: random.Random, plan: Plan) -> list[Scene]:
    shortest = plan.min_scene_pairs
    most = max(1, min(plan.max_scenes, plan.num_frame_pairs // shortest))
    num_scenes = rng.randint(min(plan.min_scenes, most), most)
    spare = plan.num_frame_pairs - num_scenes * shortest if num_scenes > 1 else 0
    cuts = sorted(rng.randint(0, spare) for _ in range(num_scenes - 1))
    starts = [0, *(cut + (i + 1) * shortest for i, cut in enumerate(cuts)), plan.num_frame_pairs]
    scenes: list[Scene] = []
    for first, end in itertools.pairwise(starts):
        others = [name for name in BACKGROUNDS if not scenes or name != scenes[-1].background]
        scenes.append(Scene(rng.choice(others), _tint(rng, 4), first, end))
    return scenes


def _sample_thing(rng: random.Random, color: str, scene: Scene, brief_share: float, others: list[Thing]) -> Thing:
    brief = rng.random() < brief_share
    first, end = _sample_span(rng, scene, brief)
    size = rng.choice(SIZES)
    fixed = {
        "color": color,
        "shape": rng.choice(SHAPES),
        "size": size,
        "motion": rng.choice(MOTIONS),
        "background": scene.background,
        "radius": RADIUS[size] + rng.uniform(-0.35, 0.35),
        "speed": rng.uniform(1.7, 3.0),
        "tint": _tint(rng, 6),
        "first_pair": first,
        "end_pair": end,
        "brief": brief,
    }
    best, best_gap = None, -math.inf
    for _ in range(PLACING_TRIES):
        x, y = _sample_start(rng, str(fixed["motion"]))
        thing = Thing(x=x, y=y, **fixed)  # type: ignore[arg-type]
        gap = min((_smallest_gap(thing, other) for other in others), default=math.inf)
        if gap > best_gap:
            best, best_gap = thing, gap
        if gap > 0:
            break
    assert best is not None
    return best


def _sample_span(rng: random.Random, scene: Scene, brief: bool) -> tuple[int, int]:
    scene_pairs = scene.end_pair - scene.first_pair
    if brief:
        num_pairs = min(rng.choice(BRIEF_PAIRS), scene_pairs)
    elif rng.random() < 0.7:
        num_pairs = scene_pairs
    else:
        num_pairs = rng.randint(math.ceil(scene_pairs / 2), scene_pairs)
    first = scene.first_pair + rng.randint(0, scene_pairs - num_pairs)
    return first, first + num_pairs


def _sample_start(rng: random.Random, motion: str) -> tuple[float, float]:
    """Anywhere along the way of motion, well inside the frame across it."""
    x, y = (rng.uniform(0, FRAME_SIZE) for _ in range(2))
    inside_x, inside_y = (rng.uniform(9.5, FRAME_SIZE - 9.5) for _ in range(2))
    return (x if motion in ("left", "right") else inside_x), (y if motion in ("up", "down") else inside_y)


def _smallest_gap(a: Thing, b: Thing) -> float:
    """Smallest distance between the rims of two things on the torus over the first frames they share."""
    first, end = 2 * max(a.first_pair, b.first_pair), 2 * min(a.end_pair, b.end_pair)
    gap = math.inf
    for frame in range(first, min(end, first + 16), 2):
        (ax, ay), (bx, by) = center(a, frame), center(b, frame)
        dx, dy = abs(ax - bx), abs(ay - by)
        gap = min(gap, math.hypot(min(dx, FRAME_SIZE - dx), min(dy, FRAME_SIZE - dy)) - a.radius - b.radius)
    return gap


def center(thing: Thing, frame: int) -> tuple[float, float]:
    """Centre of a thing in a frame of the video; things leave on one side and come back on the other."""
    age = frame - 2 * thing.first_pair
    vx, vy = thing.velocity()
    return (thing.x + vx * age) % FRAME_SIZE, (thing.y + vy * age) % FRAME_SIZE


def _tint(rng: random.Random, spread: float) -> Rgb:
    return (round(rng.gauss(0, spread)), round(rng.gauss(0, spread)), round(rng.gauss(0, spread)))
