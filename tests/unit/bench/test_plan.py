"""The planner's arithmetic, on costs whose answer is known."""

from __future__ import annotations

import json

import pytest

from bench import plan
from bench.planning.costs import DEVICES, MODELS, Costs, Line, step_ms
from bench.planning.rounds import (
    accepted,
    answers_ms,
    best_in_turn,
    best_overlapped,
    in_turn_ms,
    overlapped_ms,
    plain_ms,
)

COSTS = Costs(draft=Line(0, 1), verify=Line(9, 0))


def test_a_line_goes_through_its_points() -> None:
    line = Line.through([(0, 1.0), (2, 2.0), (4, 3.0)])
    assert (line.at(0), line.at(10)) == (pytest.approx(1), pytest.approx(6))
    assert Line.through([(3, 5.0), (3, 7.0)]).at(9) == 6
    assert Line.through([(0, 5.0), (1, 4.0)]).each == 0


def test_speeds_in_turn() -> None:
    assert accepted((0.5,), 2) == 0.75
    assert accepted((1.0, 0.0), 5) == 1.0
    assert plain_ms(COSTS) == in_turn_ms(COSTS, (0.9,), 0) == 9
    assert in_turn_ms(COSTS, (1.0,), 5) == pytest.approx(14 / 6)
    assert best_in_turn(COSTS, (0.0,)).num_draft_tokens == 0
    assert best_in_turn(COSTS, (1.0,)).num_draft_tokens == 16


def test_the_end_of_an_answer_cuts_its_last_draft() -> None:
    lens = {"answer_lens": [8], "max_tokens": 8}
    assert answers_ms(COSTS, (1.0,), 9, **lens) == pytest.approx((6 + 9) / 7)  # type: ignore[arg-type]
    assert answers_ms(COSTS, (0.0,), 0, **lens) == 9  # type: ignore[arg-type]
    endless = answers_ms(COSTS, (0.9,), 5, answer_lens=[5000], max_tokens=9000)
    assert endless == pytest.approx(in_turn_ms(COSTS, (0.9,), 5), rel=0.02)


def test_overlap_hides_all_drafting_when_nothing_is_rejected_and_none_when_everything_is() -> None:
    # While a round is verified, 9 tokens are drafted: the guess of the verifier's, and the next 8 drafts.
    assert overlapped_ms(COSTS, (1.0,), 8) == pytest.approx(1.0, rel=0.01)
    assert overlapped_ms(COSTS, (0.0,), 8) >= in_turn_ms(COSTS, (0.0,), 8)


@pytest.mark.parametrize(
    ("cost_ratio", "acceptance", "in_turn", "overlapped"),
    [(3, 0.9, 1.76, 2.18), (5, 0.8, 1.87, 2.19), (9, 0.9, 3.26, 3.95)],
)
def test_against_expectations_worked_out_elsewhere(
    cost_ratio: float, acceptance: float, in_turn: float, overlapped: float
) -> None:
    """A verification costs `cost_ratio` draft steps; speed-ups over plain decoding."""
    costs = Costs(Line(0, 1), Line(cost_ratio, 0))
    assert plain_ms(costs) / best_in_turn(costs, (acceptance,)).ms_per_token == pytest.approx(in_turn, rel=0.01)
    assert plain_ms(costs) / best_overlapped(costs, (acceptance,)).ms_per_token == pytest.approx(overlapped, rel=0.05)


def test_a_step_reads_weights_and_context_or_computes() -> None:
    target, device = MODELS[1], DEVICES[0]
    short, long = (step_ms(target, device, num_rows=1, num_tokens=tokens) for tokens in (0, 100_000))
    assert long - short == pytest.approx(100_000 * target.kv_bytes / (0.7 * device.bytes_per_s) * 1e3)
    assert step_ms(target, device, num_rows=10_000, num_tokens=0) > 10 * short


def test_known_models_are_printed_with_json_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["plan", "--only-predict"])
    plan.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(told["known"]) == len(DEVICES) * 9
    assert all(row["both_to_target"] < 2 for row in told["known"])
