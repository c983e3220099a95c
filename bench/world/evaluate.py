"""`python -m bench.world.evaluate CHECKPOINT [--n 60] [--frame-pairs 8 48 96] [--split held_out|validation]`

Facts of a checkpoint's answers by task and length.

Greedy, from mp4 files through the checkpoint's processor. The last line of output is one JSON object.
"""

import argparse
import itertools
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from bench.world.answerer import Answerer
from bench.world.sample import Sample
from bench.world.scoring import score
from bench.world.splits import held_out, validation

TASKS: tuple[tuple[str, bool | None], ...] = (
    ("caption", None),
    ("caption", True),
    ("describe", False),
    ("describe", True),
    ("question", None),
    ("multiple_choice", None),
    ("yes_no", None),
)
TRAINING_TASKS = (
    ("caption", None),
    ("describe", True),
    ("question", None),
    ("multiple_choice", None),
    ("yes_no", None),
)


@dataclass
class Tally:
    """Marks of the facts of one task's answers."""

    by_kind: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    all_right: list[int] = field(default_factory=list)

    def add(self, marks: dict[str, list[int]]) -> None:
        for kind, values in marks.items():
            self.by_kind[kind] += values
        self.all_right.append(int(all(all(values) for values in marks.values())))

    def summary(self) -> dict[str, object]:
        every = [mark for values in self.by_kind.values() for mark in values]
        kinds = {kind: round(sum(values) / len(values), 3) for kind, values in sorted(self.by_kind.items())}
        return {
            "facts": round(sum(every) / len(every), 3),
            "all_right": round(sum(self.all_right) / len(self.all_right), 3),
            "num_samples": len(self.all_right),
            "num_facts": len(every),
            "by_kind": kinds,
        }


def task_name(kind: str, brief: bool | None) -> str:
    return kind + {None: "", True: ", brief", False: ", lasting"}[brief]


def draw_samples(split: str, task: tuple[str, bool | None], num_pairs: int, num_samples: int) -> list[Sample]:
    kind, brief = task
    draw = {"held_out": held_out, "validation": validation}[split]
    return [draw(kind, index, num_frame_pairs=num_pairs, brief=brief) for index in range(num_samples)]


def evaluate(answerer: Answerer, samples: list[Sample]) -> dict[str, object]:
    tally = Tally()
    for sample in samples:
        tally.add(score(sample, answerer.answer(sample.world, [sample.question])[0]))
    return tally.summary()


def wrong_video(answerer: Answerer, samples: list[Sample]) -> dict[str, object]:
    """The control: descriptions asked for with the video of the next sample."""
    tally = Tally()
    for sample, other in itertools.pairwise(samples):
        tally.add(score(sample, answerer.answer(other.world, [sample.question])[0]))
    return tally.summary()


def report(name: str, num_pairs: int, summary: dict[str, object]) -> None:
    kinds = summary["by_kind"]
    assert isinstance(kinds, dict)
    listed = "  ".join(f"{kind} {value:.2f}" for kind, value in kinds.items())
    facts, all_right = summary["facts"], summary["all_right"]
    sys.stdout.write(f"{name:22s} {num_pairs:5d} pairs  facts {facts:.3f}  all right {all_right:.3f}  | {listed}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.world.evaluate")
    parser.add_argument("checkpoint")
    parser.add_argument("--n", type=int, default=60, help="samples per task and length")
    parser.add_argument("--frame-pairs", type=int, nargs="+", default=[8, 48, 96])
    parser.add_argument("--split", choices=("held_out", "validation"), default="held_out")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    answerer = Answerer.load(args.checkpoint)
    results: dict[str, dict[str, object]] = {}
    for num_pairs in args.frame_pairs:
        for task in TASKS:
            summary = evaluate(answerer, draw_samples(args.split, task, num_pairs, args.n))
            results[f"{task_name(*task)} @{num_pairs}"] = summary
            report(task_name(*task), num_pairs, summary)
        control = wrong_video(answerer, draw_samples(args.split, ("describe", None), num_pairs, args.n + 1))
        results[f"wrong video @{num_pairs}"] = control
        report("describe, wrong video", num_pairs, control)
    head = {"checkpoint": args.checkpoint, "split": args.split, "n": args.n}
    sys.stdout.write(json.dumps(head | {"results": results}) + "\n")


if __name__ == "__main__":
    main()
