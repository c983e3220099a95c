"""MLVU (arXiv 2406.04264): `json/N_task.json`, lists of video, question, answer and, but for open tasks, candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.evaluation.datasets.base import (
    ANSWER_MAX_TOKENS,
    CHOICE_MAX_TOKENS,
    ChoiceScorer,
    FormatError,
    Loaded,
    TextScorer,
    Videos,
    at,
    field_of,
    lettered,
    read_json,
)
from bench.evaluation.items import Item
from bench.evaluation.judge import Judge

NAME = "MLVU"
CHOICE_PROMPT = "{question}\n{options}\nOnly give the best option.\nBest option: ("


def load(folder: Path, judge: Judge | None) -> Loaded:
    """Loads the benchmark from every task's file."""
    files = sorted((folder / "json").glob("*.json"))
    if not files:
        raise FormatError(f"{folder}: has no json/*.json")
    videos, loaded = Videos(folder), Loaded(NAME)
    for file in files:
        for number, row in enumerate(read_json(file)):
            name = str(field_of(row, "video", file))
            path = videos.find(name)
            if path is None:
                loaded.missing_videos.append(name)
                continue
            loaded.items.append(_item(row, file, number, path, judge))
    return loaded


def _item(row: dict[str, Any], file: Path, number: int, path: Path, judge: Judge | None) -> Item:
    question, answer = str(field_of(row, "question", file)), str(field_of(row, "answer", file))
    candidates = row.get("candidates") or []
    shared: dict[str, Any] = {"benchmark": NAME, "id": f"{file.stem}-{number}", "video": at(path), "reference": answer}
    if not candidates:
        scorer = TextScorer(question, answer, judge)
        return Item(kind="open", question=question, max_tokens=ANSWER_MAX_TOKENS, scorer=scorer, **shared)
    if answer not in candidates:
        raise FormatError(f"{file}: row {number}: the answer is not one of the candidates")
    prompt = CHOICE_PROMPT.format(question=question, options="\n".join(lettered(candidates)))
    letters = "ABCDEFGH"[: len(candidates)]
    right = ChoiceScorer(letters[candidates.index(answer)], letters)
    return Item(kind="choice", question=prompt, max_tokens=CHOICE_MAX_TOKENS, scorer=right, **shared)
