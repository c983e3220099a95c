"""Frames of a world, and which visual token shows which thing."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.world.facts import BACKGROUND_RGB, CELLS, CELLS_PER_SIDE, COLOR_RGB, FRAME_SIZE
from bench.world.scenes import Thing, World

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
MIN_VISIBLE_PIXELS = 4.0  # of a thing in a cell, mean of the pair's two frames


def _length(x: Floats, y: Floats) -> Floats:
    length: Floats = np.sqrt(x * x + y * y)
    return length


def _both(a: Floats, b: Floats) -> Floats:
    """Inside a and inside b."""
    inside: Floats = np.maximum(a, b)
    return inside


def _circle(x: Floats, y: Floats, r: float) -> Floats:
    return _length(x, y) - np.float32(r)


def _square(x: Floats, y: Floats, r: float) -> Floats:
    return _both(np.abs(x), np.abs(y)) - np.float32(0.92 * r)


def _triangle(x: Floats, y: Floats, r: float) -> Floats:
    base = y - np.float32(0.85 * r)
    side = np.abs(x) * np.float32(0.88) - y * np.float32(0.47) - np.float32(0.5 * r)
    return _both(base, side)


def _cross(x: Floats, y: Floats, r: float) -> Floats:
    ax, ay, arm = np.abs(x), np.abs(y), np.float32(0.3 * r)
    r32 = np.float32(1.05 * r)
    return -_both(-_both(ax - r32, ay - arm), -_both(ay - r32, ax - arm))


def _ring(x: Floats, y: Floats, r: float) -> Floats:
    from_middle: Floats = np.abs(_length(x, y) - np.float32(0.8 * r))
    return from_middle - np.float32(0.22 * r)


def _bar(x: Floats, y: Floats, r: float) -> Floats:
    return _both(np.abs(x) - np.float32(1.05 * r), np.abs(y) - np.float32(0.38 * r))


# signed distances to the rim, in model pixels, negative inside
DISTANCES: dict[str, Callable[[Floats, Floats, float], Floats]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "ring": _ring,
    "bar": _bar,
}


@dataclass(frozen=True)
class Stamp:
    """A thing's antialiased mask in a window that follows it through consecutive frames."""

    frames: Ints  # [num_frames] absolute
    rows: Ints  # [num_frames, window]
    cols: Ints  # [num_frames, window]
    alpha: Floats  # [num_frames, window, window]


def stamp(thing: Thing, first_frame: int, end_frame: int, scale: int) -> Stamp:
    frames = np.arange(max(first_frame, 2 * thing.first_pair), min(end_frame, 2 * thing.end_pair))
    vx, vy = thing.velocity()
    age = frames - 2 * thing.first_pair
    half = int(np.ceil((1.1 * thing.radius + 1) * scale))
    offsets = np.arange(-half, half + 1)
    x, cols = _window((thing.x + vx * age) % FRAME_SIZE, offsets, scale)
    y, rows = _window((thing.y + vy * age) % FRAME_SIZE, offsets, scale)
    distance = DISTANCES[thing.shape](x[:, None, :], y[:, :, None], thing.radius)
    alpha = np.clip(np.float32(0.5) - distance * np.float32(scale), 0, 1)
    return Stamp(frames, rows, cols, alpha)


def _window(center: NDArray[np.floating], offsets: Ints, scale: int) -> tuple[Floats, Ints]:
    """Distances from the centre in model pixels, and pixel indices, both [num_frames, window]."""
    pixels = np.floor(center * scale).astype(np.int64)[:, None] + offsets
    distance = (pixels + 0.5) / scale - center[:, None]
    return distance.astype(np.float32), pixels % (FRAME_SIZE * scale)


def draw(world: World, *, first_frame: int = 0, end_frame: int | None = None, scale: int = 1) -> NDArray[np.uint8]:
    """Frames [num_frames, side, side, 3] with side = FRAME_SIZE * scale."""
    end = 2 * world.num_frame_pairs if end_frame is None else end_frame
    side = FRAME_SIZE * scale
    frames = np.empty((end - first_frame, side, side, 3), np.float32)
    for scene in world.scenes:
        first, last = 2 * scene.first_pair - first_frame, 2 * scene.end_pair - first_frame
        frames[max(first, 0) : max(last, 0)] = _rgb(BACKGROUND_RGB[scene.background], scene.tint)
    for thing in world.things:
        mark = stamp(thing, first_frame, end, scale)
        if not len(mark.frames):
            continue
        at = (mark.frames - first_frame)[:, None, None], mark.rows[:, :, None], mark.cols[:, None, :]
        below = frames[at]
        frames[at] = below + mark.alpha[..., None] * (_colors(thing, mark.frames)[:, None, None] - below)
    rounded: NDArray[np.uint8] = np.clip(frames + 0.5, 0, 255).astype(np.uint8)
    return rounded


def _colors(thing: Thing, frames: Ints) -> Floats:
    """[num_frames, 3]"""
    colors = np.tile(_rgb(COLOR_RGB[thing.color], thing.tint), (len(frames), 1))
    if thing.turns_to and thing.turns_pair is not None:
        colors[frames >= 2 * thing.turns_pair] = _rgb(COLOR_RGB[thing.turns_to], thing.tint)
    return colors


def _rgb(color: tuple[int, int, int], tint: tuple[int, int, int]) -> Floats:
    return np.clip(np.add(color, tint), 0, 255).astype(np.float32)


def pixels_by_cell(world: World, thing: Thing) -> Floats:
    """Pixels of a thing in each visual token's cell, mean of the pair's two frames: [num_frame_pairs, 9]."""
    mark = stamp(thing, 0, 2 * world.num_frame_pairs, 1)
    cell_side = FRAME_SIZE // CELLS_PER_SIDE
    cell = mark.rows[:, :, None] // cell_side * CELLS_PER_SIDE + mark.cols[:, None, :] // cell_side
    index = (mark.frames // 2)[:, None, None] * CELLS + cell
    total = np.bincount(index.ravel(), mark.alpha.ravel(), minlength=world.num_frame_pairs * CELLS)
    return (total / 2).astype(np.float32).reshape(world.num_frame_pairs, CELLS)


def visible_cells(world: World, thing: Thing) -> NDArray[np.bool_]:
    """Where a thing can be seen: [num_frame_pairs, 9]."""
    return pixels_by_cell(world, thing) >= MIN_VISIBLE_PIXELS
