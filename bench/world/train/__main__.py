"""`python -m bench.world.train {make,vision,language,export,plot} --out FOLDER [options]`

make: both stages of a committed checkpoint (`--name`), as its recipe says; runs are kept below the folder;
vision: the tower learns to label cells, and to imitate a trained model's tower (`--teacher`);
language: the whole model learns to answer, from a vision run (`--vision`), a checkpoint (`--init`) or both;
export: the model of a language run as it stands at its last save;
plot: a picture of a run's curve.

Schedules go by steps (`--steps`: another machine makes the same run) or else by the clock (`--budget-s`). A run started
again with the same folder goes on from its last save.
"""

import argparse
from pathlib import Path

import torch

from bench.world.families import FAMILIES
from bench.world.model import MODEL_SIZES
from bench.world.train.language import LEARNING_RATE, Settings, export, train_language
from bench.world.train.plot import plot_curve
from bench.world.train.recipes import RECIPES, make
from bench.world.train.run import Schedule
from bench.world.train.vision import train_vision


def main() -> None:
    args = _parse_arguments()
    torch.set_num_threads(args.threads)
    family = FAMILIES[args.family]
    schedule = Schedule(args.steps, args.budget_s)
    if args.stage == "make":
        make(
            args.name,
            args.out,
            args.checkpoint or args.out / args.name / "model",
            device=args.device,
            language_steps=args.steps,
            vision_steps=args.vision_steps,
            validate_every=args.validate_every,
        )
    elif args.stage == "plot":
        plot_curve(args.out / "curve.jsonl", args.picture or args.out / "curve.png")
    elif args.stage == "export":
        export(args.out, family, config=args.config, checkpoint=args.checkpoint or args.out / "model")
    elif args.stage == "vision":
        train_vision(
            args.out,
            family,
            config=args.config,
            teacher=args.teacher,
            schedule=schedule,
            seed=args.seed,
            device=args.device,
        )
    else:
        settings = Settings(
            config=args.config,
            init=args.init,
            vision=args.vision,
            device=args.device,
            learning_rate=args.learning_rate,
            turning_share=args.turning_share,
            speaker=args.speaker,
            drills_first=args.drills_first,
            curriculum_from=args.curriculum_from,
            validate_every=args.validate_every,
            num_validated=args.num_validated,
        )
        train_language(
            args.out,
            family,
            settings,
            checkpoint=args.checkpoint,
            schedule=schedule,
            seed=args.seed,
            resume_at=args.resume_at,
        )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.world.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("make", "vision", "language", "export", "plot"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the run's state and curve")
    parser.add_argument("--name", choices=tuple(RECIPES), help="make: the checkpoint")
    parser.add_argument("--vision-steps", type=int, help="make: instead of the recipe's, as --steps is of language")
    parser.add_argument("--family", choices=tuple(FAMILIES), default="qwen2_5_vl")
    parser.add_argument("--config", choices=tuple(MODEL_SIZES), default="target")
    parser.add_argument("--steps", type=int, help="length of the schedule, over all resumptions")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="without --steps: seconds of training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--teacher", type=Path, help="vision: checkpoint whose embeddings are imitated")
    parser.add_argument("--vision", type=Path, help="language: the vision run's folder")
    parser.add_argument("--init", type=Path, help="language: checkpoint to start from; of another family: its text")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="language: at its highest")
    parser.add_argument("--speaker", type=int, help="language: seed of the habits of wording; without: the usual ones")
    parser.add_argument("--drills-first", type=int, default=0, help="language: steps of drills without videos")
    parser.add_argument("--curriculum-from", type=float, default=0.0, help="language: share of the lessons to skip")
    parser.add_argument("--turning-share", type=float, default=0.0, help="language: of things; events are then asked")
    parser.add_argument("--validate-every", type=int, help="language: steps between evaluations, written to the curve")
    parser.add_argument("--num-validated", type=int, default=8, help="language: samples of each kind")
    parser.add_argument("--checkpoint", type=Path, help="language, export: where to save the model for use")
    parser.add_argument("--resume-at", type=float, help="language: go on at this share of the schedule")
    parser.add_argument("--picture", type=Path, help="plot: file to write")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.stage == "make" and arguments.name is None:
        parser.error("make needs --name")
    return arguments


if __name__ == "__main__":
    main()
