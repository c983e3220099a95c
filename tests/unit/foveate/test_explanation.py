"""Explained answers: read back from JSON, on the screen, as a page, and what is refused."""

from __future__ import annotations

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foveate.cli.main import app
from foveate.client import Origin
from foveate.explanation import from_json
from foveate.explanation_html import page
from foveate.rpc.errors import InvalidArgument


def detail(number: int, relevance: float | None = 0.5, target: str = "", draft: str = "") -> dict[str, Any]:
    return {
        "round": number,
        "relevance": relevance,
        "entropy": None if relevance is None else 0.25,
        "log_probability": None if relevance is None else -0.5,
        "target_token_id": 7 if target else None,
        "target_text": target,
        "draft_token_id": 8 if draft else None,
        "draft_text": draft,
    }


ANSWER: dict[str, Any] = {
    "question": "What <moves> & how?",
    "token_texts": ["The", " ball", " glides", " left", " now", "."],
    "origins": ["plain", "accepted", "loose", "salvaged", "bonus", "recovered"],
    "details": [
        detail(0, None),
        detail(1, 0.9),
        detail(1, 0.1, target=" <b>moves"),
        detail(1, 0.8, target=" to"),
        detail(1, 0.3),
        detail(2, 0.2, draft="!"),
    ],
    "guarantee": "loose",
    "policy": "lvspec",
    "stats": {"draft_mode": "small"},
    "accepted_per_round": 3.0,
}


def test_tokens_rounds_and_counts() -> None:
    told = from_json(ANSWER)
    assert [(number, len(tokens)) for number, tokens in told.rounds] == [(0, 1), (1, 4), (2, 1)]
    assert told.counts[Origin.LOOSE] == told.counts[Origin.SALVAGED] == 1
    assert told.relevance_range == (0.1, 0.9)
    assert [token.text for token in told.tokens if token.is_loose] == [" glides", " left"]


@pytest.mark.parametrize(
    "change",
    [
        {"details": []},
        {"origins": ["plain"]},
        {"origins": ["invented"] * 6},
        {"stats": None},
        {"token_texts": [], "origins": [], "details": []},
        {"details": [{}] * 6},
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        from_json({**ANSWER, **change})
    with pytest.raises(InvalidArgument):
        from_json({})


class _Checked(HTMLParser):
    """Every element is closed in order, save those that may stay open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "td", "th"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_whole_and_safe() -> None:
    text = page(from_json(ANSWER))
    checked = _Checked()
    checked.feed(text)
    assert checked.open == []
    assert not {"script", "link", "img", "b", "moves"} & set(checked.seen)
    assert "What &lt;moves&gt; &amp; how?" in text
    assert "&lt;b&gt;moves" in text
    assert text.count('class="mark"') == 2
    assert "2 of 6 tokens against the verifier" in text


def test_an_answer_without_scores_has_no_strip() -> None:
    answer = copy.deepcopy(ANSWER)
    answer["details"] = [detail(one["round"], None) for one in ANSWER["details"]]
    answer["origins"] = ["plain"] * 6
    text = page(from_json(answer))
    assert "Relevance to the video" not in text
    assert "What looseness did" not in text


def test_the_command_shows_and_writes(tmp_path: Path) -> None:
    file, target = tmp_path / "answer.json", tmp_path / "answer.html"
    file.write_text(json.dumps(ANSWER))
    shown = CliRunner().invoke(app, ["explain", str(file)])
    assert shown.exit_code == 0
    assert "The ball glides left now." in shown.output
    assert "relevance 0.100 to 0.900" in shown.output
    assert " <b>moves" in shown.output
    assert CliRunner().invoke(app, ["explain", str(file), "--html", str(target)]).exit_code == 0
    assert target.read_text() == page(from_json(ANSWER))


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    assert CliRunner().invoke(app, ["explain", str(file)]).exit_code == 4
    for content in ("not json", "[1, 2]", "{}"):
        file.write_text(content)
        assert CliRunner().invoke(app, ["explain", str(file)]).exit_code == 3
    file.write_text(json.dumps(ANSWER))
    assert CliRunner().invoke(app, ["explain", str(file), "--html", str(tmp_path / "no/where.html")]).exit_code == 3
