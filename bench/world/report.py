"""All held-out scores of all checkpoints.

    python -m bench.world.report [--n 16] [--checkpoints checkpoints/tiny-qwen2_5-vl ...] [--workers 2]

Greedy, from mp4 files through each checkpoint's processor. A file is made once and read by every checkpoint; several
questions are asked about it. `facts` is the share of right facts in captions and descriptions of 8, 48 and 96 frame
pairs, `questions` the share of right short answers, `facts_long` is `facts` at 456 frame pairs and more (4k visual
tokens), `looping` the share of answers at 4k, 16k and 64k visual tokens that repeat themselves or never end. The
controls ask for descriptions with another video, and with the asked thing's scene cut out: there the colour, which the
question itself tells, is not counted; `right` is the same count with the right video.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.report import mean_and_error, print_json, print_table, say
from bench.world.answerer import FPS, Answerer, Reply
from bench.world.controls import without_asked_scenes
from bench.world.looping import repeats
from bench.world.mp4 import iterate_mp4, write_mp4
from bench.world.questions import ASKERS, ask_background
from bench.world.sample import Sample
from bench.world.scenes import World
from bench.world.scoring import score
from bench.world.splits import held_out

CHECKPOINTS = Path("checkpoints")
FRAME_PAIRS = (8, 48, 96)
LONG_PAIRS = {"4k": 456, "16k": 1821, "64k": 7282}
LONG_ASKED = ("caption", "describe", "describe", "question", "question", "yes_no")
ASKED = ("caption", "describe", "describe", "question", "question", "multiple_choice", "yes_no", "explained")


@dataclass(frozen=True)
class Job:
    """A video and what is asked about it."""

    world: World
    group: str  # "short", "4k", "16k", "64k", "wrong video", "wrong scene", "right"
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Scored:
    """One checkpoint's answer to one sample."""

    checkpoint: str
    group: str
    kind: str
    marks: dict[str, list[int]]
    is_looping: bool


def jobs(num_worlds: int, longest: int) -> list[Job]:
    """The longest first, so that the workers end together; longest: visual tokens, in thousands."""
    out: list[Job] = []
    for name, num_pairs in reversed(LONG_PAIRS.items()):
        num_videos = max(1, num_worlds // 4) if name == "4k" else max(1, num_worlds // 8) if name == "16k" else 1
        if int(name.removesuffix("k")) <= longest:
            repeats_ = 4 if name == "64k" else 1
            out += [_job(name, index, num_pairs, LONG_ASKED * repeats_) for index in range(num_videos)]
    for num_pairs in FRAME_PAIRS:
        out += [_job("short", index, num_pairs, ASKED) for index in range(num_worlds)]
        out += _controls(num_worlds, num_pairs)
    return out


def _job(group: str, index: int, num_pairs: int, kinds: Sequence[str]) -> Job:
    world = held_out("caption", index, num_frame_pairs=num_pairs).world
    rng = random.Random(f"{world.seed} report")
    asked = [ASKERS[kind](rng, world) for kind in kinds]
    if group == "short":
        asked.append(ask_background(rng, world))
    return Job(world, group, tuple(asked))


def _controls(num_worlds: int, num_pairs: int) -> Iterator[Job]:
    samples = [held_out("describe", index, num_frame_pairs=num_pairs) for index in range(num_worlds + 1)]
    for sample, other in itertools.pairwise(samples):
        yield Job(sample.world, "right", (sample,))
        yield Job(other.world, "wrong video", (sample,))
        cut = without_asked_scenes(sample)
        if cut is not None:
            yield Job(cut, "wrong scene", (sample,))


def answers(job: Job, answerers: dict[str, Answerer], only_targets: bool) -> Iterator[Scored]:
    """Every checkpoint's answers; the file is decoded once."""
    asking = {name: one for name, one in answerers.items() if not (only_targets and name.endswith("-draft"))}
    readings = {name: answerer.begin() for name, answerer in asking.items()}
    with tempfile.TemporaryDirectory(prefix="foveate-report-") as folder:
        path = Path(folder) / "video.mp4"
        write_mp4(job.world, path, fps=FPS)
        for frames in iterate_mp4(path):
            for reading in readings.values():
                reading.see(frames)
    for name in list(readings):
        replies = readings.pop(name).ask([sample.question for sample in job.samples])
        for sample, reply in zip(job.samples, replies, strict=True):
            yield _scored(name, job.group, sample, reply)


def _scored(checkpoint: str, group: str, sample: Sample, reply: Reply) -> Scored:
    marks = score(sample, reply.text)
    return Scored(checkpoint, group, sample.kind, marks, reply.hit_limit or repeats(reply.token_ids))


_answerers: dict[str, Answerer] = {}


def _start_worker(checkpoints: Sequence[Path]) -> None:
    torch.set_num_threads(1)
    _answerers.update({path.name: Answerer.load(path) for path in checkpoints})


def _work(job: Job) -> list[Scored]:
    return list(answers(job, _answerers, only_targets=job.group == "64k"))


def run(checkpoints: Sequence[Path], todo: Sequence[Job], num_workers: int) -> list[Scored]:
    started_s = time.monotonic()
    scored: list[Scored] = []
    with ProcessPoolExecutor(
        num_workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(checkpoints,)
    ) as pool:
        pending = [pool.submit(_work, job) for job in todo]
        for done, future in enumerate(as_completed(pending), start=1):
            scored += future.result()
            if done % 25 == 0:
                say(f"{done}/{len(todo)} videos, {time.monotonic() - started_s:.0f} s")
    return scored


def summary(scored: Iterable[Scored]) -> dict[str, Any]:
    """The scores of one checkpoint."""
    by_group: defaultdict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        by_group[one.group].append(one)
    short, long = by_group["short"], by_group["4k"]
    told = [one for one in short if one.kind in ("caption", "describe")]
    asked = [one for one in short if one.kind == "question"]
    return {
        "facts": _share(told),
        "facts_by_kind": _by_kind(told),
        "all_right": round(mean_and_error([float(_all_right(one)) for one in told])[0], 3),
        "questions": _share(asked),
        "questions_by_kind": _by_kind(asked),
        "multiple_choice": _share([one for one in short if one.kind == "multiple_choice"]),
        "explained": _share([one for one in short if one.kind == "explained"]),
        "facts_long": _share([one for one in long if one.kind in ("caption", "describe")]),
        "questions_long": _share([one for one in long if one.kind == "question"]),
        "right": _share(by_group["right"], uncounted=("color",)),
        "wrong_video": _share(by_group["wrong video"], uncounted=("color",)),
        "wrong_scene": _share(by_group["wrong scene"], uncounted=("color",)),
        "looping": _looping([one for name in LONG_PAIRS for one in by_group[name]]),
        "looping_by_visual_tokens": {name: _looping(by_group[name]) for name in LONG_PAIRS if by_group[name]},
        "num_answers": sum(map(len, by_group.values())),
    }


def _share(scored: Iterable[Scored], *, uncounted: tuple[str, ...] = ()) -> float | None:
    marks = [mark for one in scored for kind, values in one.marks.items() if kind not in uncounted for mark in values]
    return round(sum(marks) / len(marks), 3) if marks else None


def _by_kind(scored: Sequence[Scored]) -> dict[str, float | None]:
    kinds = sorted({kind for one in scored for kind in one.marks})
    return {kind: _share([_only(one, kind) for one in scored]) for kind in kinds}


def _only(one: Scored, kind: str) -> Scored:
    return Scored(one.checkpoint, one.group, one.kind, {kind: one.marks.get(kind, [])}, one.is_looping)


def _all_right(one: Scored) -> bool:
    return all(all(values) for values in one.marks.values())


def _looping(scored: Sequence[Scored]) -> float | None:
    return round(sum(one.is_looping for one in scored) / len(scored), 3) if scored else None


def main() -> None:
    arguments = _parse_arguments()
    checkpoints = arguments.checkpoints or sorted(path.parent for path in CHECKPOINTS.glob("*/config.json"))
    todo = jobs(arguments.n, arguments.longest)
    say(f"{len(checkpoints)} checkpoints, {len(todo)} videos, {sum(len(job.samples) for job in todo)} questions each")
    started_s = time.monotonic()
    scored = run(checkpoints, todo, arguments.workers)
    result = {path.name: summary([one for one in scored if one.checkpoint == path.name]) for path in checkpoints}
    _print(result)
    say(f"{time.monotonic() - started_s:.0f} s")
    print_json(result)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, nargs="+", help=f"default: all in {CHECKPOINTS}/")
    parser.add_argument("--n", type=int, default=16, help="videos of each length")
    parser.add_argument("--longest", type=int, default=64, help="longest videos, in thousands of visual tokens")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    return parser.parse_args()


def _print(result: dict[str, dict[str, Any]]) -> None:
    shown = [
        name
        for name in next(iter(result.values()))
        if not name.endswith("_by_kind") and name != "looping_by_visual_tokens"
    ]
    print_table("held-out scores", ["", *result], [[name, *(one[name] for one in result.values())] for name in shown])
    for name, one in result.items():
        say(f"{name}: facts {json.dumps(one['facts_by_kind'])}, questions {json.dumps(one['questions_by_kind'])}")
        say(f"{name}: looping {json.dumps(one['looping_by_visual_tokens'])}")


if __name__ == "__main__":
    main()
