"""Writes the scores of a report into the checkpoints' model cards.

    python -m bench.world.report > report.txt
    python -m bench.world.card report.txt

A card that is there keeps its text but for the section of scores; a missing one is begun from what is known of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from bench.world.train.recipes import CHECKPOINTS, RECIPES

HEADING = "## Held-out scores"
MEANING = {
    "facts": "facts of captions and descriptions, 8 to 96 frame pairs",
    "all_right": "captions and descriptions without a wrong fact",
    "questions": "short answers",
    "multiple_choice": "letters",
    "explained": "letters and yes/no after a sentence of explanation",
    "facts_long": "facts at 456 frame pairs (4k visual tokens)",
    "questions_long": "short answers at 456 frame pairs",
    "right": "size, shape and motion in descriptions",
    "wrong_video": "the same with another video",
    "wrong_scene": "the same with the scene cut out of the video",
    "looping": "answers at 4k, 16k and 64k visual tokens that repeat themselves or do not end",
}
NAMES = {"qwen2_5_vl": "Qwen2.5-VL", "qwen2_vl": "Qwen2-VL", "llava_onevision": "LLaVA-OneVision"}


def scores(name: str, result: dict[str, Any]) -> str:
    """The section of scores."""
    rows = [f"| {meaning} | {result[key]:.3f} |" for key, meaning in MEANING.items() if result.get(key) is not None]
    lines = [
        HEADING,
        "",
        f"`python -m bench.world.report --checkpoints checkpoints/{name}`: greedy, from mp4 files through the "
        f"processor, {result['num_answers']} answers about held-out videos.",
        "",
        "| what | share |",
        "|---|---|",
        *rows,
        "",
        f"Facts by kind: {_listed(result['facts_by_kind'])}. "
        f"Questions by kind: {_listed(result['questions_by_kind'])}. "
        f"Looping by visual tokens: {_listed(result['looping_by_visual_tokens'])}.",
        "",
    ]
    return "\n".join(lines)


def _listed(shares: dict[str, float]) -> str:
    return ", ".join(f"{kind} {share:.2f}" for kind, share in shares.items()) or "none asked"


def with_scores(card: str, section: str) -> str:
    """The card with its section of scores replaced, or added after its first section."""
    before, found, after = card.partition(HEADING + "\n")
    if not found:
        first, separator, rest = card.partition("\n## ")
        return f"{first.rstrip()}\n\n{section}{separator}{rest}"
    rest = after.partition("\n## ")
    return f"{before}{section}{rest[1]}{rest[2]}"


def new_card(name: str, folder: Path) -> str:
    """What a recipe and the weights tell of a checkpoint."""
    recipe = RECIPES[name]
    role = "target" if recipe.config == "target" else "drafter"
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        num_params = sum(weights.get_tensor(key).numel() for key in weights.keys())  # noqa: SIM118
    lines = [
        f"# {name}",
        "",
        f"The {role} of {NAMES[recipe.family]} structure: {num_params / 1e6:.2f} million parameters, bf16, "
        "real transformers classes, trained in the drawn world of `bench/world`. It knows nothing else.",
        "",
        "## Training",
        "",
        f"`python -m bench.world.train make --name {name} --out runs --checkpoint checkpoints/{name}`: vision stage of "
        f"{recipe.vision_steps} steps, language stage of {recipe.language_steps} steps, seed {recipe.seed}, fp32.",
    ]
    if recipe.teacher:
        lines.append(f"Text model from `{recipe.teacher}`, whose tower the vision stage imitates.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="output of bench.world.report")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS)
    arguments = parser.parse_args()
    results = json.loads(arguments.report.read_text().splitlines()[-1])
    for name, result in results.items():
        folder = arguments.checkpoints / name
        card = folder / "README.md"
        text = card.read_text() if card.exists() else new_card(name, folder)
        card.write_text(with_scores(text, scores(name, result)))


if __name__ == "__main__":
    main()
