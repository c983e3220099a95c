"""Figures of an evaluation against hand-made records: T, speed-ups, fidelity, theory, resuming, reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.evaluation import theory
from bench.evaluation.methods import ablations, drafter_methods, headline_methods, other_policies, theory_methods
from bench.evaluation.records import Record, RecordFile
from bench.evaluation.report import write_report
from bench.evaluation.summary import fact_difference, relevance_auc, summarise
from bench.evaluation.text_metrics import bleu_4, rouge_l
from bench.evaluation.world import stated_facts, world_items

BASE = Record(
    model="m",
    benchmark="world-caption",
    item="0",
    method="plain",
    text="A red circle.",
    num_tokens=41,
    num_visual_tokens=72,
    num_rounds=40,
    num_draft_rounds=0,
    num_draft_tokens=0,
    accepted_per_pos=[],
    num_loose=0,
    num_salvaged=0,
    decode_ms=400.0,
    ask_ms=420.0,
    context_ms=100.0,
    marks_right=4,
    marks_total=5,
)


def drafted(method: str, item: str = "0", **changes: object) -> Record:
    fields = {
        "num_rounds": 5,
        "num_draft_rounds": 5,
        "num_draft_tokens": 50,
        "accepted_per_pos": [5, 4, 4, 3, 2, 2, 1, 1, 1, 1],
    }
    return replace(BASE, method=method, item=item, decode_ms=100.0, ask_ms=120.0, **{**fields, **changes})  # type: ignore[arg-type]


def test_figures_of_a_method() -> None:
    loose = drafted("lvspec", num_loose=6, num_salvaged=2, marks_right=3, is_equal_to_plain=False, agreement=0.75)
    other = replace(BASE, item="1", marks_right=5), drafted("lvspec", "1", marks_right=5)
    summaries = summarise([BASE, loose, *other], "world-caption", "m")
    one = summaries["lvspec"]
    assert one.accepted_per_round == pytest.approx(24 / 5)
    assert one.acceptance_per_pos[:3] == pytest.approx((1.0, 0.8, 0.8))
    assert (one.decode_speedup, one.end_to_end_speedup) == (pytest.approx(4), pytest.approx(520 / 220))
    assert (one.facts, one.fidelity) == (pytest.approx(0.8), pytest.approx(8 / 9))
    assert one.fidelity_interval[0] <= one.fidelity <= one.fidelity_interval[1]
    assert (one.loose_share, one.salvaged_share) == (pytest.approx(6 / 48), pytest.approx(2 / 48))
    assert (one.agreement, one.equal_share) == (0.875, 0.5)
    assert summaries["plain"].decode_speedup == 1
    assert summarise([loose], "world-caption", "m") == {}


def test_a_difference_in_facts_is_of_the_items_both_have() -> None:
    records = [drafted("a", str(item), marks_right=5) for item in range(8)]
    records += [drafted("b", str(item), marks_right=4) for item in range(6)]
    mean, (low, high) = fact_difference(records, "world-caption", "m", "a", "b")
    assert (mean, low, high) == (pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.2))
    assert fact_difference([], "world-caption", "m", "a", "b") == (0.0, (0.0, 0.0))


def test_the_mismatch_rate_counts_rounds_that_end_with_one() -> None:
    # Five rounds: one full, one that ended the answer, three rejections; 24 accepted.
    assert theory.mismatch_rate([drafted("exact")], 10) == pytest.approx(3 / 27)
    assert theory.mismatch_rate([], 10) == 0


@pytest.mark.parametrize(("rate", "lam", "expected"), [(0.0, 0.3, 10.0), (0.5, 1.0, 10.0), (1.0, 0.0, 0.0)])
def test_expected_t(rate: float, lam: float, expected: float) -> None:
    assert theory.expected_t(rate, lam, 10) == expected
    assert theory.expected_t(0.21, 0.0, 10) == pytest.approx(3.41, abs=0.02)  # the paper's own figure
    assert theory.expected_t(0.21, 0.7, 10) == pytest.approx(7.15, abs=0.15)


def test_rounds_that_kept_everything_can_be_cut_anew() -> None:
    details = {
        "texts": ["a"] * 8,
        "rounds": [0, 1, 1, 1, 1, 1, 2, 2],
        "origins": ["plain", "accepted", "loose", "accepted", "loose", "bonus", "accepted", "recovered"],
        "relevance": [None, 0.9, 0.1, 0.2, 0.8, 0.5, 0.3, 0.4],
    }
    record = drafted("theory 1", details=details)
    rounds = theory.rounds_of(record)
    assert rounds == [([0.9, 0.1, 0.2, 0.8], [False, True, False, True])]  # the last round ends the answer
    assert theory.kept_per_round(record) == [4]
    assert theory.t_of_rounds(rounds, 1.0) == 4
    assert theory.t_of_rounds(rounds, 0.5) == 3  # the two most relevant are strict: the first and the last
    assert theory.t_of_rounds(rounds, 0.0) == 1
    assert theory.strict_mismatch_rate(rounds, 0.5) == 0.25
    assert theory.strict_mismatch_rate(rounds, 0.0) == 0.5
    assert theory.rate_of_rounds([10, 4, 10, 0], 10) == pytest.approx(2 / 26)
    assert theory.rate_of_rounds([], 10) == 0


def test_auc_of_relevance_in_explained_answers() -> None:
    details = {"texts": [" red", " the", " circle", " is"], "relevance": [0.9, 0.1, 0.4, 0.5]}
    assert relevance_auc([drafted("explained", details=details)]) == pytest.approx(0.75)
    assert relevance_auc([BASE]) is None


def test_records_survive_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "runs/records.jsonl"
    RecordFile(path).add([BASE, drafted("exact")])
    with path.open("a") as file:
        file.write('{"model": "m", "bench')
    again = RecordFile(path)
    assert list(again) == [BASE, drafted("exact")]
    assert again.get(BASE.key) == BASE
    assert again.get(("m", "world-caption", "1", "plain")) is None


def test_a_report_is_a_section_that_replaces_itself(tmp_path: Path) -> None:
    docs = tmp_path / "docs/results.md"
    docs.parent.mkdir()
    docs.write_text("# Results\n\nKept.\n")
    records = RecordFile(tmp_path / "records.jsonl")
    methods = [*headline_methods(), *drafter_methods(), *other_policies(), *ablations(), *theory_methods()]
    details = {"texts": [" red", "."], "rounds": [1, 2], "origins": ["loose", "plain"], "relevance": [0.5, 0.1]}
    records.add([BASE, *(drafted(one.name, details=details if one.explain else {}) for one in methods)])
    write_report(records, "m", docs, pictures=tmp_path / "docs/plots", command="python -m bench.evaluate")
    first = docs.read_text()
    write_report(records, "m", docs, pictures=tmp_path / "docs/plots", command="python -m bench.evaluate")
    assert docs.read_text() == first
    assert first.startswith("# Results\n\nKept.\n")
    assert "`python -m bench.evaluate`, made from" in first
    for method in methods:
        if method.group != "theory":
            assert f"| {method.name} | 1 |" in first
    assert sorted(path.name for path in (tmp_path / "docs/plots").iterdir()) == [
        "m-lambda.png",
        "m-positions.png",
        "m-speed.png",
    ]


def test_method_names_are_unique() -> None:
    methods = [*headline_methods(), *drafter_methods(), *other_policies(), *ablations(), *theory_methods()]
    assert len({method.name for method in methods}) == len(methods)


def test_world_items_score_facts_and_agreement() -> None:
    item = next(world_items("caption", 1))
    assert item.scorer.score(item.reference).right == item.scorer.score(item.reference).total  # type: ignore[union-attr]
    assert item.scorer.agreement(item.reference, item.reference) == 1
    assert item.scorer.agreement("Nothing.", item.reference) == 0
    assert stated_facts("There is one thing. We see a red large circle that moves left.") == {
        ("red", "color", "red"),
        ("red", "size", "large"),
        ("red", "shape", "circle"),
        ("red", "motion", "left"),
        ("", "count", "one"),
    }


def test_text_metrics() -> None:
    assert rouge_l("the cat sat", "the cat sat") == 1
    assert rouge_l("the cat sat", "a dog ran") == 0
    assert rouge_l("the cat is fat", "the fat cat is here") == pytest.approx(2 * 3 / 9)
    assert bleu_4("the cat sat on the mat", "the cat sat on the mat") == pytest.approx(1)
    assert bleu_4("", "the cat") == bleu_4("dog", "the cat") == 0
    assert 0 < bleu_4("the cat sat", "the cat sat on the mat") < bleu_4("the cat sat on", "the cat sat on the mat") < 1
