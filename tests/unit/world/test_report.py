import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.world import HELD_OUT, Sample, held_out
from bench.world import report as report_module
from bench.world.controls import without_asked_scenes
from bench.world.draw import draw
from bench.world.families import FAMILIES
from bench.world.looping import repeats
from bench.world.model import MODEL_SIZES
from bench.world.report import Scored, jobs, main, summary
from bench.world.sample import asked_things
from bench.world.tokenizer import build_tokenizer
from bench.world.train.language import save_checkpoint


def test_loops_are_told_from_lists_of_alike_things() -> None:
    assert repeats([5, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 9])
    assert repeats([7] * 12)
    assert not repeats([7] * 11)
    assert not repeats([1, 2, 3, 4, 1, 2, 3, 4, 9])
    assert not repeats([])


def test_right_answers_are_no_loops() -> None:
    tokenizer = build_tokenizer()
    answers = [held_out("caption", index, num_frame_pairs=48).answer for index in range(400)]
    assert not any(repeats(tokenizer(answer)["input_ids"]) for answer in answers)


def cut_samples() -> list[Sample]:
    samples = [held_out("describe", index, num_frame_pairs=24) for index in range(40)]
    return [sample for sample in samples if without_asked_scenes(sample) is not None]


def test_a_cut_video_shows_the_rest_as_it_was() -> None:
    samples = cut_samples()
    assert len(samples) > 5
    for sample in samples:
        cut = without_asked_scenes(sample)
        assert cut is not None
        assert not {thing.color for thing in cut.things} & {thing.color for thing in asked_things(sample)}
        assert cut.scenes[-1].end_pair == cut.num_frame_pairs < sample.world.num_frame_pairs
        frames, whole = draw(cut), draw(sample.world)
        for thing in cut.things:
            before = sample.world.thing(thing.color)
            mine = frames[2 * thing.first_pair : 2 * thing.end_pair]
            assert np.array_equal(mine, whole[2 * before.first_pair : 2 * before.end_pair])


def test_every_reported_video_is_held_out() -> None:
    todo = jobs(3, 64)
    assert all(sample.seed in HELD_OUT for job in todo for sample in job.samples)
    assert {job.group for job in todo} == {"short", "4k", "16k", "64k", "right", "wrong video", "wrong scene"}
    assert all(job.world.num_frame_pairs * 9 >= 4096 for job in todo if job.group == "4k")
    wrong = [job for job in todo if job.group == "wrong video"]
    assert all(job.world.seed != sample.seed for job in wrong for sample in job.samples)


def test_scores_are_shares_of_facts() -> None:
    scored = [
        Scored("a", "short", "caption", {"color": [1, 1], "shape": [1, 0]}, False),
        Scored("a", "short", "question", {"yes_no": [1]}, False),
        Scored("a", "short", "question", {"order": [0]}, False),
        Scored("a", "4k", "describe", {"color": [1, 0]}, True),
        Scored("a", "16k", "caption", {"color": [1]}, False),
        Scored("a", "wrong video", "describe", {"color": [1, 1], "motion": [0, 1]}, False),
    ]
    result = summary(scored)
    assert result["facts"] == 0.75
    assert result["facts_by_kind"] == {"color": 1.0, "shape": 0.5}
    assert result["questions"] == 0.5
    assert result["facts_long"] == 0.5
    assert result["looping"] == 0.5
    assert result["looping_by_visual_tokens"] == {"4k": 1.0, "16k": 0.0}
    assert result["wrong_video"] == 0.5
    assert result["multiple_choice"] is None


@pytest.mark.slow
def test_the_last_line_is_every_checkpoints_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("qwen2_vl", "llava_onevision")]
    for folder in folders:
        family = FAMILIES[folder.name]
        save_checkpoint(family.build_model(MODEL_SIZES["drafter"]), family.build_processor(), folder)
    monkeypatch.setattr(report_module, "jobs", lambda *_: [job for job in jobs(1, 0) if job.world.num_frame_pairs <= 8])
    monkeypatch.setattr(sys, "argv", ["report", "--workers", "1", "--checkpoints", *map(str, folders)])
    main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == {"qwen2_vl", "llava_onevision"}
    for one in result.values():
        assert 0 <= one["facts"] < 0.5
        assert one["num_answers"] > 8
