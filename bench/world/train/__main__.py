"""`python -m bench.world.train {vision,language} --out FOLDER --budget-s S --seed N [--config target|drafter]`

`export` writes the model of a language run as it stands at its last save.
"""

import argparse
from pathlib import Path

import torch

from bench.world.model import MODEL_SIZES
from bench.world.train.language import export, train_language
from bench.world.train.vision import train_vision


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.world.train")
    parser.add_argument("stage", choices=("vision", "language", "export"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the run's state and curve")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="seconds of training over all resumptions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--config", choices=tuple(MODEL_SIZES), default="target")
    parser.add_argument("--vision", type=Path, help="language stage: the vision stage's folder")
    parser.add_argument("--checkpoint", type=Path, help="language stage: where to save the model for use")
    parser.add_argument("--resume-at-s", type=float, help="go on at this point of the schedule")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    common = {"config": args.config, "budget_s": args.budget_s, "seed": args.seed, "device": args.device}
    if args.stage == "vision":
        train_vision(args.out, **common)
    elif args.stage == "export":
        export(args.out, config=args.config, checkpoint=args.checkpoint)
    else:
        train_language(args.out, vision=args.vision, checkpoint=args.checkpoint, resume_at_s=args.resume_at_s, **common)


if __name__ == "__main__":
    main()
