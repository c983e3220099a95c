"""One question about one video, and how its answer is scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Marks:
    """How many of the things that can be scored are right; free-text scores count as one thing in [0, 1]."""

    right: float
    total: int


class Scorer(Protocol):
    """Scores answers to one question."""

    def score(self, text: str) -> Marks | None:
        """Against the truth; None when only a judge could."""

    def agreement(self, text: str, own: str) -> float:
        """How much of what the target's own answer says this one says too, 0 to 1."""


@dataclass(frozen=True)
class Item:
    """One question. `video` writes or finds the file in a given folder; `kind` is "caption", "choice" or "open"."""

    benchmark: str
    id: str
    kind: str
    question: str
    max_tokens: int
    video: Callable[[Path], Path]
    scorer: Scorer
    fps: float | None = None
    max_frames: int | None = None
    reference: str = ""
