"""MovieChat-1K (arXiv 2307.16449): a JSON file a video with `info.video_path`, `caption` and questions under `global`.

Breakpoint questions are about a moment of the film, for which a player would have to stop: they are left out.
"""

from __future__ import annotations

from pathlib import Path

from bench.evaluation.datasets.base import (
    ANSWER_MAX_TOKENS,
    FormatError,
    Loaded,
    TextScorer,
    Videos,
    at,
    field_of,
    read_json,
)
from bench.evaluation.items import Item
from bench.evaluation.judge import Judge

NAME = "MovieChat"


def load(folder: Path, judge: Judge | None) -> Loaded:
    """Loads the global questions of every video."""
    files = sorted(file for file in folder.rglob("*.json"))
    if not files:
        raise FormatError(f"{folder}: has no JSON file")
    videos, loaded = Videos(folder), Loaded(NAME)
    for file in files:
        told = read_json(file)
        name = str(field_of(field_of(told, "info", file), "video_path", file))
        path = videos.find(name)
        if path is None:
            loaded.missing_videos.append(name)
            continue
        for number, row in enumerate(field_of(told, "global", file)):
            question, answer = str(field_of(row, "question", file)), str(field_of(row, "answer", file))
            loaded.items.append(
                Item(
                    benchmark=NAME,
                    id=f"{file.stem}-{number}",
                    kind="open",
                    question=question,
                    max_tokens=ANSWER_MAX_TOKENS,
                    video=at(path),
                    scorer=TextScorer(question, answer, judge),
                    reference=answer,
                )
            )
    return loaded
