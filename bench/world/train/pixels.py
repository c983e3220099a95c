"""Frames and per-cell labels of training videos, drawn directly at model size."""

import random

import numpy as np
from numpy.typing import NDArray

from bench.world.draw import draw, pixels_by_cell
from bench.world.facts import BACKGROUNDS, CELLS, COLORS, FRAME_SIZE, MOTIONS, SHAPES, SIZES
from bench.world.scenes import World, center

MIN_LABEL_PIXELS = 14.0  # below this a cell shows too little of a thing to tell what it is
MAX_EMPTY_PIXELS = 1.0
UNLABELLED = -100
# the extra colour: no thing
LABEL_CLASSES = [len(COLORS) + 1, len(SHAPES), len(SIZES), len(MOTIONS), len(BACKGROUNDS)]
LABEL_NAMES = ("color", "shape", "size", "motion", "background")


def augment(frames: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.float32]:
    """What a codec and a resize do to a file: a little blur, drift and grain."""
    out = frames.astype(np.float32)
    if rng.random() < 0.3:
        out = _blur(out, np.float32(rng.uniform(0.03, 0.12)))
    out += rng.normal(0, 2, size=3).astype(np.float32)
    grain = rng.uniform(0.5, 3.0)
    out += np.float32(grain) * _grain(rng, out.shape)
    return out


def _blur(frames: NDArray[np.float32], share: np.float32) -> NDArray[np.float32]:
    """Give each pixel this share of each of its four neighbours."""
    padded = np.pad(frames, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    around = padded[:, 2:, 1:-1] + padded[:, :-2, 1:-1] + padded[:, 1:-1, 2:] + padded[:, 1:-1, :-2]
    return frames * (1 - 4 * share) + share * around


_GRAIN = np.random.default_rng(7).normal(size=(1 << 20) + (1 << 16)).astype(np.float32)


def _grain(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Normal noise cut from a fixed strip: drawing fresh noise would cost more than drawing the video."""
    frame = shape[1] * shape[2] * shape[3]
    starts = rng.integers(0, len(_GRAIN) - frame, size=shape[0])
    return np.stack([_GRAIN[start : start + frame] for start in starts]).reshape(shape)


def video_frames(world: World, rng: random.Random) -> NDArray[np.float32]:
    """Frames [num_frames, 48, 48, 3] as a file would give them."""
    return augment(draw(world), np.random.default_rng(rng.getrandbits(32)))


def cell_labels(world: World) -> NDArray[np.int64]:
    """Class ids [num_frame_pairs, 9, 5] in the order of LABEL_NAMES; UNLABELLED where a cell does not show it."""
    num_pairs = world.num_frame_pairs
    labels = np.full((num_pairs, CELLS, len(LABEL_NAMES)), UNLABELLED, np.int64)
    for scene in world.scenes:
        labels[scene.first_pair : scene.end_pair, :, 4] = BACKGROUNDS.index(scene.background)
    pixels = np.stack([pixels_by_cell(world, thing) for thing in world.things])  # [num_things, num_pairs, 9]
    labels[pixels.sum(0) < MAX_EMPTY_PIXELS, 0] = len(COLORS)
    for shown, thing in zip(pixels, world.things, strict=True):
        mine = (shown >= MIN_LABEL_PIXELS) & (shown == pixels.max(0))
        labels[mine, :4] = (
            COLORS.index(thing.color),
            SHAPES.index(thing.shape),
            SIZES.index(thing.size),
            MOTIONS.index(thing.motion),
        )
        if thing.turns_to and thing.turns_pair is not None:
            turned = mine & (np.arange(num_pairs) >= thing.turns_pair)[:, None]
            labels[turned, 0] = COLORS.index(thing.turns_to)
    return labels


def without_first_motion(world: World, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Labels [num_frame_pairs, 9, 5] without the motion of things on their first pair: one frame cannot show it."""
    kept = labels.copy()
    for thing in world.things:
        first = kept[thing.first_pair]
        first[first[:, 0] == COLORS.index(thing.color), 3] = UNLABELLED
    return kept


def cell_places(world: World) -> NDArray[np.float32]:
    """Where the labelled thing of a cell is on each pair's first frame: [num_frame_pairs, 9, 4]; NaN without one.

    Cosine and sine of its centre's x and y, a turn being a frame's side: things that leave come back on the other side.
    """
    places = np.full((world.num_frame_pairs, CELLS, 4), np.nan, np.float32)
    colors = cell_labels(world)[:, :, 0]
    for thing in world.things:
        shown = [COLORS.index(color) for color in (thing.color, thing.turns_to) if color]
        for pair, cell in np.argwhere(np.isin(colors, shown)):
            angles = np.array(center(thing, 2 * int(pair))) * (2 * np.pi / FRAME_SIZE)
            places[pair, cell] = np.stack([np.cos(angles), np.sin(angles)], axis=1).flatten()
    return places
