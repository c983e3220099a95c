import json
import sys
from pathlib import Path

import pytest

from bench.world.card import HEADING, main, with_scores
from bench.world.families import FAMILIES
from bench.world.model import MODEL_SIZES
from bench.world.report import Scored, summary
from bench.world.train.language import save_checkpoint


def test_only_the_section_of_scores_changes() -> None:
    card = f"# a\n\nIt is small.\n\n{HEADING}\n\nold\n\n## Limits\n\nMany.\n"
    assert (
        with_scores(card, f"{HEADING}\n\nnew\n") == f"# a\n\nIt is small.\n\n{HEADING}\n\nnew\n\n## Limits\n\nMany.\n"
    )


def test_scores_are_added_before_the_second_section() -> None:
    assert with_scores("# a\n\nText.\n\n## Training\n\nLong.\n", f"{HEADING}\n\nnew\n") == (
        f"# a\n\nText.\n\n{HEADING}\n\nnew\n\n## Training\n\nLong.\n"
    )


def test_a_new_card_tells_size_scores_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tiny-llava-onevision-draft"
    family = FAMILIES["llava_onevision"]
    model = family.build_model(MODEL_SIZES["drafter"])
    save_checkpoint(model, family.build_processor(), tmp_path / name)
    scored = [
        Scored(name, "short", "caption", {"color": [1, 0, 1, 1]}, False),
        Scored(name, "64k", "caption", {"color": [1]}, True),
    ]
    (tmp_path / "report.txt").write_text("progress\n" + json.dumps({name: summary(scored)}) + "\n")
    monkeypatch.setattr(sys, "argv", ["card", str(tmp_path / "report.txt"), "--checkpoints", str(tmp_path)])
    main()
    once = (tmp_path / name / "README.md").read_text()
    main()
    assert (tmp_path / name / "README.md").read_text() == once
    assert f"{sum(param.numel() for param in model.parameters()) / 1e6:.2f} million" in once
    assert "| facts of captions and descriptions, 8 to 96 frame pairs | 0.750 |" in once
    assert "64k 1.00" in once
    assert f"make --name {name}" in once
    assert once.index(HEADING) < once.index("## Training")
