"""What a request may say about acceptance, and what it gets when it says nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from foveate.rpc.errors import FailedPrecondition
from gateway.acceptance import PARAMETERS, AcceptanceFields, acceptance_of, acceptance_violations
from gateway.facts import AcceptanceLimits, RelevanceInfo
from gateway.values import Acceptance, AcceptancePolicy, FlyVariant, RelevancePool

LIMITS = AcceptanceLimits(relevance=RelevanceInfo(6, True, False, 8, quantiles=(0.0, 0.5, 0.75)))
LVSPEC, FLY, EXACT = AcceptancePolicy.LVSPEC, AcceptancePolicy.FLY, AcceptancePolicy.EXACT


def wrong(limits: AcceptanceLimits = LIMITS, **fields: object) -> list[str]:
    return [path for path, _ in acceptance_violations(AcceptanceFields(**fields), limits)]  # type: ignore[arg-type]


def accepted(limits: AcceptanceLimits = LIMITS, **fields: object) -> Acceptance:
    assert wrong(limits, **fields) == []
    return acceptance_of(AcceptanceFields(**fields), limits)  # type: ignore[arg-type]


def test_defaults() -> None:
    assert accepted() == Acceptance(EXACT)
    lvspec = accepted(policy=LVSPEC)
    assert (lvspec.lam, lvspec.window, lvspec.num_nearest, lvspec.pool) == (0.7, 3, None, RelevancePool.PER_ROUND)
    assert (lvspec.guard_special, lvspec.guard_numbers, lvspec.guard_negations) == (True, True, True)
    fly = accepted(policy=FLY)
    assert (fly.window, fly.entropy_threshold, fly.variant) == (6, 0.3, FlyVariant.CODE)


def test_a_deployment_sets_default_and_ceiling() -> None:
    strict = replace(LIMITS, default=LVSPEC, allowed=frozenset({EXACT, LVSPEC}), max_lambda=0.4)
    assert accepted(strict) == Acceptance(LVSPEC, lam=0.4)
    assert accepted(strict, lam=0.4).lam == 0.4
    assert accepted(strict, policy=EXACT).policy is EXACT
    assert wrong(strict, lam=0.41) == ["acceptance.lambda"]
    assert wrong(strict, policy=FLY) == ["acceptance.policy"]


def test_lvspec_needs_visual_states() -> None:
    assert wrong(replace(LIMITS, relevance=None), policy=LVSPEC) == ["acceptance.policy"]
    assert wrong(replace(LIMITS, relevance=None), policy=FLY) == []


@pytest.mark.parametrize("policy", list(AcceptancePolicy))
def test_parameters_of_other_policies_are_refused(policy: AcceptancePolicy) -> None:
    examples = {
        "lam": 0.5,
        "num_nearest": 3,
        "window": 2,
        "pool": RelevancePool.THRESHOLD,
        "threshold": 0.1,
        "entropy_threshold": 0.2,
        "variant": FlyVariant.PAPER,
        "guard_special": False,
        "guard_numbers": False,
        "guard_negations": False,
        "max_loose_run": 2,
        "min_probability": 0.1,
        "seed": 5,
    }
    assert examples.keys() == frozenset().union(*PARAMETERS.values())
    own = {name: value for name, value in examples.items() if name in PARAMETERS[policy]}
    taken = accepted(policy=policy, **own)
    assert all(getattr(taken, name) == value for name, value in own.items())
    for name in examples.keys() - own.keys() - {"threshold"}:
        path = "acceptance.lambda" if name == "lam" else f"acceptance.{name}"
        assert wrong(policy=policy, **{name: examples[name]}) == [path]


@pytest.mark.parametrize(
    ("policy", "field", "values"),
    [
        (LVSPEC, "lam", [-0.1, 1.1, math.nan]),
        (LVSPEC, "num_nearest", [0, 1025]),
        (LVSPEC, "window", [17]),
        (LVSPEC, "pool", [9]),
        (LVSPEC, "min_probability", [-0.1, 1.1, math.nan]),
        (FLY, "window", [0, 17]),
        (FLY, "entropy_threshold", [-0.1, math.nan, math.inf]),
        (FLY, "variant", [3]),
    ],
)
def test_outside_of_the_range(policy: AcceptancePolicy, field: str, values: list[float]) -> None:
    for value in values:
        path = "acceptance.lambda" if field == "lam" else f"acceptance.{field}"
        assert wrong(policy=policy, **{field: value}) == [path]
    assert wrong(policy=99) == ["acceptance.policy"]


def test_a_threshold_comes_from_the_request_or_the_calibration() -> None:
    fixed = {"policy": LVSPEC, "pool": RelevancePool.THRESHOLD}
    assert accepted(**fixed, threshold=-0.25).threshold == -0.25
    assert accepted(**fixed, lam=0.25).threshold == pytest.approx(0.25)
    assert accepted(**fixed, lam=1.0).threshold == pytest.approx(0.75)
    assert wrong(policy=LVSPEC, threshold=0.1) == ["acceptance.threshold"]
    assert wrong(**fixed, threshold=1.5) == ["acceptance.threshold"]
    uncalibrated = replace(LIMITS, relevance=RelevanceInfo(6, True, False, 8))
    with pytest.raises(FailedPrecondition) as caught:
        acceptance_of(AcceptanceFields(**fixed), uncalibrated)  # type: ignore[arg-type]
    assert caught.value.reason == "NOT_CALIBRATED"
