"""Items of the drawn test world: facts are known, so answers are scored without a judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.evaluation.items import Item, Marks
from bench.world import Sample, held_out, score, validation, write_mp4
from bench.world.scoring import parse

FPS = 4.0
FRAME_PAIRS = (8, 16, 24, 48)
SPLITS: dict[str, Callable[..., Sample]] = {"held_out": held_out, "validation": validation}
_KINDS = {"caption": "caption", "multiple_choice": "choice"}
_MAX_TOKENS = {"caption": 200, "multiple_choice": 16}


@dataclass(frozen=True)
class WorldScorer:
    """Facts against the world, and against the target's own answer."""

    sample: Sample

    def score(self, text: str) -> Marks:
        marks = [mark for kind in score(self.sample, text).values() for mark in kind]
        return Marks(sum(marks), len(marks))

    def agreement(self, text: str, own: str) -> float:
        """Share of the facts stated by either answer that both state; 1 when neither states any."""
        if self.sample.kind not in ("caption", "describe"):
            return float(text.strip() == own.strip())
        mine, theirs = stated_facts(text), stated_facts(own)
        return len(mine & theirs) / len(mine | theirs) if mine | theirs else 1.0


def stated_facts(text: str) -> set[tuple[str, str, str]]:
    """Returns (colour, kind, value) of everything a description says."""
    said = parse(text)
    found = {(color, kind, value) for color, things in said.things.items() for kind, value in things.items()}
    found |= {(color, "color", color) for color in said.things}
    return found | ({("", "count", said.count)} if said.count else set())


def world_items(kind: str, number: int, *, split: str = "held_out") -> Iterator[Item]:
    """Yields items of a kind of question, videos of several lengths in turn."""
    for index in range(number):
        sample = SPLITS[split](kind, index, num_frame_pairs=FRAME_PAIRS[index % len(FRAME_PAIRS)])
        yield Item(
            benchmark=f"world-{kind}",
            id=f"{split}-{index}",
            kind=_KINDS.get(kind, "open"),
            question=sample.question,
            max_tokens=_MAX_TOKENS.get(kind, 120),
            video=_writer(sample, index),
            scorer=WorldScorer(sample),
            fps=FPS,
            reference=sample.answer,
        )


def _writer(sample: Sample, index: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / f"{sample.kind}-{index}.mp4"
        write_mp4(sample.world, path, fps=FPS)
        return path

    return write
