"""VideoDetailCaption, VDC (AuroraCap, arXiv 2410.03051): `VDC_1k.jsonl`, a video's captions of five aspects a line."""

from __future__ import annotations

from pathlib import Path

from bench.evaluation.datasets.base import (
    CAPTION_MAX_TOKENS,
    FormatError,
    Loaded,
    TextScorer,
    Videos,
    at,
    field_of,
    read_jsonl,
)
from bench.evaluation.items import Item
from bench.evaluation.judge import Judge

NAME = "VDC"
# One prompt of each aspect's list in the benchmark, always the same, so that runs can be compared.
PROMPTS = {
    "detailed_caption": "Describe the video based on these frames in a few sentences.",
    "main_object_caption": "Describe the main subject's actions and movements.",
    "background_caption": "Describe the background, including objects, location, weather, and time.",
    "camera_caption": "Describe the camera movements in these frames.",
    "short_caption": "Write a one-sentence summary of the video.",
}


def load(folder: Path, judge: Judge | None) -> Loaded:
    """Loads an item for every aspect that a video has a caption of."""
    files = sorted(folder.glob("VDC*.jsonl"))
    if not files:
        raise FormatError(f"{folder}: has no VDC*.jsonl")
    videos, loaded = Videos(folder), Loaded(NAME)
    for file in files:
        for row in read_jsonl(file):
            name = str(row.get("video_name") or field_of(row, "video_id", file))
            path = videos.find(name)
            if path is None:
                loaded.missing_videos.append(name)
                continue
            captions = row.get("captions", row)
            for aspect, prompt in PROMPTS.items():
                if captions.get(aspect):
                    loaded.items.append(
                        Item(
                            benchmark=f"{NAME} {aspect.removesuffix('_caption')}",
                            id=f"{name}-{aspect}",
                            kind="caption",
                            question=prompt,
                            max_tokens=CAPTION_MAX_TOKENS,
                            video=at(path),
                            scorer=TextScorer(prompt, str(captions[aspect]), judge),
                            reference=str(captions[aspect]),
                        )
                    )
    return loaded
