"""Video-MME (arXiv 2405.21075): `**/test-*.parquet` with videoID, question, options, answer; videos by videoID."""

from __future__ import annotations

from pathlib import Path

from bench.evaluation.datasets.base import CHOICE_MAX_TOKENS, ChoiceScorer, Loaded, Videos, at, field_of, read_parquet
from bench.evaluation.items import Item
from bench.evaluation.judge import Judge

NAME = "Video-MME"
PROMPT = (
    "Select the best answer to the following multiple-choice question based on the video. Respond with only the letter "
    "(A, B, C, or D) of the correct option.\n{question}\n{options}\nThe best answer is:"
)


def load(folder: Path, judge: Judge | None) -> Loaded:
    """Loads the benchmark; the benchmark name carries the video's length class: short, medium or long."""
    videos, loaded = Videos(folder), Loaded(NAME)
    for row in read_parquet(folder, "test-*.parquet"):
        name = str(field_of(row, "videoID", folder))
        path = videos.find(name)
        if path is None:
            loaded.missing_videos.append(name)
            continue
        options = "\n".join(field_of(row, "options", folder))
        loaded.items.append(
            Item(
                benchmark=f"{NAME} {field_of(row, 'duration', folder)}",
                id=str(field_of(row, "question_id", folder)),
                kind="choice",
                question=PROMPT.format(question=field_of(row, "question", folder), options=options),
                max_tokens=CHOICE_MAX_TOKENS,
                video=at(path),
                scorer=ChoiceScorer(str(field_of(row, "answer", folder)).strip()[:1]),
            )
        )
    return loaded
