"""Video Detail Description, VDD (LMMs-Lab): `**/test-*.parquet` with video_name, question, answer."""

from __future__ import annotations

from pathlib import Path

from bench.evaluation.datasets.base import CAPTION_MAX_TOKENS, Loaded, TextScorer, Videos, at, field_of, read_parquet
from bench.evaluation.items import Item
from bench.evaluation.judge import Judge

NAME = "VDD"


def load(folder: Path, judge: Judge | None) -> Loaded:
    """Loads the benchmark; its own questions are the prompts."""
    videos, loaded = Videos(folder), Loaded(NAME)
    for number, row in enumerate(read_parquet(folder, "test-*.parquet")):
        name = str(field_of(row, "video_name", folder))
        path = videos.find(name)
        if path is None:
            loaded.missing_videos.append(name)
            continue
        question, answer = str(field_of(row, "question", folder)), str(field_of(row, "answer", folder))
        loaded.items.append(
            Item(
                benchmark=NAME,
                id=f"{name}-{number}",
                kind="caption",
                question=question,
                max_tokens=CAPTION_MAX_TOKENS,
                video=at(path),
                scorer=TextScorer(question, answer, judge),
                reference=answer,
            )
        )
    return loaded
