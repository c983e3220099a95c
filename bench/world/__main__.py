"""`python -m bench.world show SEED [--out sheet.png]` and `python -m bench.world mp4 SEED out.mp4 --frame-pairs N`"""

import argparse
import random
import sys
from pathlib import Path

from bench.world.contact_sheet import contact_sheet, thing_line
from bench.world.mp4 import write_mp4
from bench.world.questions import ask_caption
from bench.world.scenes import Plan, World, sample_world


def truth(world: World) -> str:
    lines = [thing_line(thing) + "\n" for thing in world.things]
    return "".join(lines) + ask_caption(random.Random(world.seed), world).answer + "\n"


def show(seed: int, plan: Plan, out: Path) -> None:
    """Prints what is true of a video and draws its contact sheet."""
    world = sample_world(seed, plan)
    contact_sheet(world).save(out)
    sys.stdout.write(f"{truth(world)}{out}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.world")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("show", help="draw a contact sheet and print what is true of the video")
    shown.add_argument("seed", type=int)
    shown.add_argument("--out", type=Path, help="default: world-SEED.png")
    mp4 = commands.add_parser("mp4", help="write the video to a file and print what is true of it")
    mp4.add_argument("seed", type=int)
    mp4.add_argument("out", type=Path)
    for command in (shown, mp4):
        command.add_argument("--frame-pairs", type=int, default=48)
        command.add_argument("--max-things", type=int, default=4)
        command.add_argument("--turning-share", type=float, default=0.0, help="of the things")
    args = parser.parse_args()
    plan = Plan(args.frame_pairs, max_things=args.max_things, turning_share=args.turning_share)
    if args.command == "mp4":
        world = sample_world(args.seed, plan)
        write_mp4(world, args.out)
        sys.stdout.write(truth(world))
    else:
        show(args.seed, plan, args.out or Path(f"world-{args.seed}.png"))


if __name__ == "__main__":
    main()
