"""What every published benchmark needs: files of its format, videos by name, scorers of letters and of free text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.evaluation.items import Item, Marks
from bench.evaluation.judge import Judge
from bench.evaluation.text_metrics import rouge_l

VIDEO_SUFFIXES = (".mp4", ".MP4", ".mkv", ".webm", ".mov", ".avi")
CHOICE_MAX_TOKENS = 16
CAPTION_MAX_TOKENS = 512
ANSWER_MAX_TOKENS = 128


class FormatError(Exception):
    """A file is not in the benchmark's published format; the text names file and field."""


@dataclass
class Loaded:
    """Items of a benchmark, and the videos that were not there."""

    benchmark: str
    items: list[Item] = field(default_factory=list)
    missing_videos: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Returns a line about what was found."""
        missing = sorted(set(self.missing_videos))
        told = f"; {len(missing)} videos are missing and skipped: {', '.join(missing)}" if missing else ""
        return f"{self.benchmark}: {len(self.items)} questions{told}"


class Videos:
    """Videos below a folder, by file name with or without its suffix; subfolders are looked into."""

    def __init__(self, folder: Path) -> None:
        self._by_name: dict[str, Path] = {}
        for path in sorted(folder.rglob("*")):
            if path.suffix in VIDEO_SUFFIXES and path.is_file():
                self._by_name.setdefault(path.name, path)
                self._by_name.setdefault(path.stem, path)

    def find(self, name: str) -> Path | None:
        """Returns the video of a name, whatever folders the name has before it."""
        return self._by_name.get(Path(name).name) or self._by_name.get(Path(name).stem)


@dataclass(frozen=True)
class ChoiceScorer:
    """Multiple choice by letter: the first letter that stands alone, or opens the answer."""

    letter: str
    letters: str = "ABCD"

    def score(self, text: str) -> Marks:
        return Marks(float(self.chosen(text) == self.letter), 1)

    def agreement(self, text: str, own: str) -> float:
        return float(self.chosen(text) == self.chosen(own))

    def chosen(self, text: str) -> str | None:
        """Returns the letter that a text chooses, if it does."""
        found = re.search(rf"(?<![A-Za-z])([{self.letters}])(?![A-Za-z])", text)
        return found.group(1) if found else None


@dataclass(frozen=True)
class TextScorer:
    """Free text by ROUGE-L, or by a judge."""

    question: str
    reference: str
    judge: Judge | None = None

    def score(self, text: str) -> Marks:
        value = rouge_l(text, self.reference) if self.judge is None else self._judged(text)
        return Marks(value, 1)

    def agreement(self, text: str, own: str) -> float:
        return 1.0 if text == own else rouge_l(text, own)

    def _judged(self, text: str) -> float:
        assert self.judge is not None
        return self.judge.score(self.question, self.reference, text)


def at(path: Path) -> Callable[[Path], Path]:
    """Returns an item's `video` for a file that exists already."""
    return lambda folder: path


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises FormatError."""
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}: not JSON ({error})") from error


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; raises FormatError."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            try:
                yield dict(json.loads(line))
            except (json.JSONDecodeError, TypeError, ValueError) as error:
                raise FormatError(f"{path}:{number}: not a JSON object ({error})") from error


def read_parquet(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a dataset's parquet files, in order; raises FormatError when there is none."""
    from pyarrow import parquet  # needed for these benchmarks only

    paths = sorted(folder.rglob(pattern))
    if not paths:
        raise FormatError(f"{folder}: has no {pattern}")
    for path in paths:
        yield from parquet.read_table(path).to_pylist()


def field_of(row: dict[str, Any], name: str, where: Path) -> Any:
    """Returns a field of a row; raises FormatError, naming the file and the field, when it is not there."""
    if name not in row or row[name] is None:
        raise FormatError(f"{where}: a row has no {name!r}")
    return row[name]


def lettered(options: Sequence[str]) -> list[str]:
    """Returns options as "(A) ..." lines."""
    return [f"({letter}) {option}" for letter, option in zip("ABCDEFGH", options, strict=False)]
