"""`python -m bench.world show SEED [--out x.png]` and `python -m bench.world mp4 SEED out.mp4 --frame-pairs N`"""

import argparse
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from bench.world.draw import draw
from bench.world.facts import FRAME_SIZE
from bench.world.mp4 import write_mp4
from bench.world.questions import ask_caption
from bench.world.scenes import Plan, World, sample_world

COLUMNS = 12
SHEET_SCALE = 2
GAP = 4  # pixels between frames


def contact_sheet(world: World) -> Image.Image:
    """The first frame of every pair, row by row."""
    side = FRAME_SIZE * SHEET_SCALE
    rows = -(-world.num_frame_pairs // COLUMNS)
    sheet = np.full((rows * (side + GAP) + GAP, COLUMNS * (side + GAP) + GAP, 3), 200, np.uint8)
    for pair in range(world.num_frame_pairs):
        frame = draw(world, first_frame=2 * pair, end_frame=2 * pair + 1, scale=SHEET_SCALE)[0]
        top, left = (GAP + index * (side + GAP) for index in divmod(pair, COLUMNS))
        sheet[top : top + side, left : left + side] = frame
    return Image.fromarray(sheet)


def truth(world: World) -> str:
    lines = [
        f"pairs {thing.first_pair:4d} to {thing.end_pair:4d}: {thing.size} {thing.color} {thing.shape}, "
        f"motion {thing.motion}, background {thing.background}\n"
        for thing in world.things
    ]
    return "".join(lines) + ask_caption(random.Random(world.seed), world).answer + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.world")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw a contact sheet and print what is true of the video")
    show.add_argument("seed", type=int)
    show.add_argument("--out", type=Path)
    mp4 = commands.add_parser("mp4", help="write the video to a file and print what is true of it")
    mp4.add_argument("seed", type=int)
    mp4.add_argument("out", type=Path)
    for command in (show, mp4):
        command.add_argument("--frame-pairs", type=int, default=48)
        command.add_argument("--max-things", type=int, default=4)
    args = parser.parse_args()
    world = sample_world(args.seed, Plan(args.frame_pairs, max_things=args.max_things))
    sys.stdout.write(truth(world))
    if args.command == "mp4":
        write_mp4(world, args.out)
    elif args.out:
        contact_sheet(world).save(args.out)


if __name__ == "__main__":
    main()
