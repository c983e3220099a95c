"""Loaders of published benchmarks on small folders in exactly their formats; scorers; missing videos."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from bench.evaluation.datasets import FormatError, load_all, mlvu, moviechat, vdc, vdd, video_mme
from bench.evaluation.datasets.base import ChoiceScorer, TextScorer
from bench.evaluation.judge import Judge, JudgeError


def video(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.fixture
def video_mme_folder(tmp_path: Path) -> Path:
    rows = [
        {
            "video_id": "001",
            "duration": duration,
            "domain": "Knowledge",
            "sub_category": "Humanity & History",
            "url": f"https://www.youtube.com/watch?v={name}",
            "videoID": name,
            "question_id": f"001-{number}",
            "task_type": "Counting Problem",
            "question": "How many candles are there?",
            "options": ["A. One.", "B. Two.", "C. Three.", "D. Four."],
            "answer": "C",
        }
        for number, (name, duration) in enumerate((("fFjv93ACGo8", "short"), ("N1cdUjctpG8", "long"), ("gone", "long")))
    ]
    folder = tmp_path / "video_mme"
    (folder / "videomme").mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "videomme/test-00000-of-00001.parquet")
    video(folder / "data/fFjv93ACGo8.mp4")
    video(folder / "data/N1cdUjctpG8.mkv")
    return folder


def test_video_mme(video_mme_folder: Path, tmp_path: Path) -> None:
    loaded = video_mme.load(video_mme_folder, None)
    assert [item.benchmark for item in loaded.items] == ["Video-MME short", "Video-MME long"]
    first = loaded.items[0]
    assert first.question.endswith(
        "How many candles are there?\nA. One.\nB. Two.\nC. Three.\nD. Four.\nThe best answer is:"
    )
    assert first.video(tmp_path).name == "fFjv93ACGo8.mp4"
    assert first.scorer.score("C. Three.").right == 1  # type: ignore[union-attr]
    assert first.scorer.score("B").right == 0  # type: ignore[union-attr]
    assert loaded.missing_videos == ["gone"]
    assert loaded.describe() == "Video-MME: 2 questions; 1 videos are missing and skipped: gone"


def test_mlvu(tmp_path: Path) -> None:
    folder = tmp_path / "mlvu"
    (folder / "json").mkdir(parents=True)
    plot = [
        {
            "video": "movie101_66.mp4",
            "duration": 246.03,
            "question": "What color is the main male character's top?",
            "candidates": ["Yellow", "Red", "Green", "Blue"],
            "answer": "Green",
            "question_type": "plotQA",
        }
    ]
    summary = [
        {"video": "217.mp4", "duration": 480.0, "question": "Summarize.", "answer": "Ducks.", "question_type": "s"}
    ]
    (folder / "json/1_plotQA.json").write_text(json.dumps(plot))
    (folder / "json/9_summary.json").write_text(json.dumps(summary))
    video(folder / "video/1_plotQA/movie101_66.mp4")
    loaded = mlvu.load(folder, None)
    (item,) = loaded.items
    assert item.question.endswith(
        "(A) Yellow\n(B) Red\n(C) Green\n(D) Blue\nOnly give the best option.\nBest option: ("
    )
    assert item.scorer.score("C) Green").right == 1  # type: ignore[union-attr]
    assert loaded.missing_videos == ["217.mp4"]
    video(folder / "video/9_summary/217.mp4")
    assert [one.kind for one in mlvu.load(folder, None).items] == ["choice", "open"]
    plot[0]["answer"] = "Black"
    (folder / "json/1_plotQA.json").write_text(json.dumps(plot))
    with pytest.raises(FormatError, match="candidates"):
        mlvu.load(folder, None)


def test_moviechat(tmp_path: Path) -> None:
    folder = tmp_path / "moviechat"
    told = {
        "info": {"video_path": "1.mp4", "w": 1920, "h": 1080, "class": "movie", "num_frame": 9000, "fps": 25.0},
        "caption": "A long walk.",
        "global": [{"question": "Is it day?", "answer": "Yes"}, {"question": "Who walks?", "answer": "A man"}],
        "breakpoint": [{"time": 120, "question": "What now?", "answer": "He stops"}],
    }
    (folder / "annotations").mkdir(parents=True)
    (folder / "annotations/1.json").write_text(json.dumps(told))
    (folder / "annotations/2.json").write_text(json.dumps({**told, "info": {"video_path": "2.mp4"}}))
    video(folder / "videos/1.mp4")
    loaded = moviechat.load(folder, None)
    assert [item.question for item in loaded.items] == ["Is it day?", "Who walks?"]
    assert loaded.items[1].scorer.score("A man walks").right == pytest.approx(0.8)  # type: ignore[union-attr]
    assert loaded.missing_videos == ["2.mp4"]


def test_vdc(tmp_path: Path) -> None:
    folder = tmp_path / "vdc"
    captions = {
        "short_caption": "A dog runs.",
        "background_caption": "A park in the sun.",
        "main_object_caption": "A brown dog.",
        "camera_caption": "The camera follows.",
        "detailed_caption": "A brown dog runs through a park.",
    }
    lines = [{"video_id": "abc123", "captions": captions}, {"video_name": "gone", **captions}]
    folder.mkdir()
    (folder / "VDC_1k.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    video(folder / "videos/abc123.mp4")
    loaded = vdc.load(folder, None)
    assert [item.benchmark for item in loaded.items] == [
        "VDC detailed",
        "VDC main_object",
        "VDC background",
        "VDC camera",
        "VDC short",
    ]
    assert loaded.items[0].reference == captions["detailed_caption"]
    assert loaded.missing_videos == ["gone"]
    (folder / "VDC_1k.jsonl").write_text('{"video_id": "abc123"\n')
    with pytest.raises(FormatError, match=r"VDC_1k\.jsonl:1"):
        vdc.load(folder, None)


def test_vdd(tmp_path: Path) -> None:
    folder = tmp_path / "vdd"
    (folder / "data").mkdir(parents=True)
    rows = [
        {"video_name": "v_p1QGn0IzfW0", "question": "Please provide a detailed description.", "answer": "A man cooks."},
        {"video_name": "v_gone", "question": "Please provide a detailed description.", "answer": "A cat."},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data/test-00000-of-00001.parquet")
    video(folder / "Test_Videos/v_p1QGn0IzfW0.mp4")
    (item,) = vdd.load(folder, None).items
    assert (item.question, item.reference) == (rows[0]["question"], "A man cooks.")


def test_a_data_folder_with_some_of_them(video_mme_folder: Path, tmp_path: Path) -> None:
    (loaded,) = load_all(tmp_path, limit=1)
    assert len(loaded.items) == 1
    assert len(load_all(tmp_path)[0].items) == 2
    with pytest.raises(FormatError, match="video_mme"):
        load_all(video_mme_folder)


@pytest.mark.parametrize(
    ("load", "name"), [(video_mme.load, "parquet"), (mlvu.load, "json"), (moviechat.load, "JSON"), (vdc.load, "jsonl")]
)
def test_a_folder_without_its_files_is_named(load: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=name):
        load(tmp_path, None)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("A", "A"), ("(B) because", "B"), ("The best answer is: C.", "C"), ("D", "D"), ("An apple", None), ("", None)],
)
def test_the_chosen_letter(text: str, chosen: str | None) -> None:
    scorer = ChoiceScorer("A")
    assert scorer.chosen(text) == chosen
    assert scorer.score(text).right == (chosen == "A")
    assert scorer.agreement(text, text) == 1


class _Grader(BaseHTTPRequestHandler):
    reply = "4"
    asked: dict[str, Any]

    def do_POST(self) -> None:
        type(self).asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"choices": [{"message": {"content": self.reply}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def grader() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Grader) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        server.shutdown()
        thread.join()


def test_a_judge_is_asked_over_http(grader: str) -> None:
    scorer = TextScorer("Who?", "A man", Judge(grader, "grader-1"))
    assert scorer.score("Some man").right == 0.8
    prompt = _Grader.asked["messages"][0]["content"]
    assert (_Grader.asked["model"], "Who?" in prompt, "A man" in prompt, "Some man" in prompt) == (
        "grader-1",
        *[True] * 3,
    )
    _Grader.reply = "no idea"
    try:
        with pytest.raises(JudgeError, match="no idea"):
            scorer.score("Some man")
    finally:
        _Grader.reply = "4"
    for wrong in ("http://127.0.0.1:9/nothing", "file:///etc/passwd"):
        with pytest.raises(JudgeError):
            Judge(wrong, "m", timeout_s=2).score("q", "r", "t")
