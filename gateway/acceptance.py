"""What a request may say about acceptance: which policy with which parameters, within what this server allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from foveate.rpc.errors import FailedPrecondition
from gateway.facts import AcceptanceLimits
from gateway.values import Acceptance, AcceptancePolicy, FlyVariant, RelevancePool

MAX_NEAREST = 1024
MAX_WINDOW = 16
_FLY_WINDOW = 6

_GUARDS = ("guard_special", "guard_numbers", "guard_negations", "max_loose_run", "min_probability")
PARAMETERS: dict[AcceptancePolicy, frozenset[str]] = {
    AcceptancePolicy.EXACT: frozenset(),
    AcceptancePolicy.LVSPEC: frozenset({"lam", "num_nearest", "window", "pool", "threshold", *_GUARDS}),
    AcceptancePolicy.FLY: frozenset({"window", "entropy_threshold", "variant", *_GUARDS}),
    AcceptancePolicy.FLY_GATE: frozenset({"entropy_threshold", *_GUARDS}),
    AcceptancePolicy.RANDOM: frozenset({"lam", "window", "seed", *_GUARDS}),
}


@dataclass(frozen=True)
class AcceptanceFields:
    """Acceptance as it came: unset is None, enumerations may be any number."""

    policy: int | None = None
    lam: float | None = None
    num_nearest: int | None = None
    window: int | None = None
    pool: int | None = None
    threshold: float | None = None
    entropy_threshold: float | None = None
    variant: int | None = None
    guard_special: bool | None = None
    guard_numbers: bool | None = None
    guard_negations: bool | None = None
    max_loose_run: int | None = None
    min_probability: float | None = None
    seed: int | None = None

    def set_values(self) -> dict[str, Any]:
        """Returns what was set, the policy left out."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "policy"}
        return {name: value for name, value in given.items() if value is not None}


def acceptance_violations(asked: AcceptanceFields, limits: AcceptanceLimits) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the fields, by their path."""
    policy = limits.default if asked.policy is None else asked.policy
    if policy not in set(AcceptancePolicy):
        yield "acceptance.policy", "is not a known policy"
        return
    chosen = AcceptancePolicy(policy)
    if chosen not in limits.allowed:
        allowed = ", ".join(sorted(one.name for one in limits.allowed))
        yield "acceptance.policy", f"{chosen.name} is not allowed by this server, which allows {allowed}"
    if chosen is AcceptancePolicy.LVSPEC and limits.relevance is None:
        yield "acceptance.policy", "LVSPEC needs visual states, which this server's verifier does not keep"
    for name in sorted(asked.set_values().keys() - PARAMETERS[chosen]):
        yield f"acceptance.{_wire_name(name)}", f"is not a parameter of {chosen.name}"
    yield from _range_violations(asked, chosen, limits)


def acceptance_of(asked: AcceptanceFields, limits: AcceptanceLimits) -> Acceptance:
    """Returns valid acceptance with its defaults. Raises FailedPrecondition when the model has no calibration."""
    policy = limits.default if asked.policy is None else AcceptancePolicy(asked.policy)
    defaults = Acceptance(policy=policy, lam=min(Acceptance.lam, limits.max_lambda))
    if policy is AcceptancePolicy.FLY:
        defaults = replace(defaults, window=_FLY_WINDOW)
    given = asked.set_values()
    if "pool" in given:
        given["pool"] = RelevancePool(given["pool"])
    if "variant" in given:
        given["variant"] = FlyVariant(given["variant"])
    acceptance = replace(defaults, **given)
    if acceptance.pool is RelevancePool.THRESHOLD and asked.threshold is None:
        acceptance = replace(acceptance, threshold=_calibrated(acceptance.lam, limits))
    return acceptance


def _range_violations(
    asked: AcceptanceFields, policy: AcceptancePolicy, limits: AcceptanceLimits
) -> Iterator[tuple[str, str]]:
    # Comparisons are written so that NaN fails them.
    if asked.lam is not None and not 0 <= asked.lam <= limits.max_lambda:
        yield "acceptance.lambda", f"must be 0 to {limits.max_lambda:g}"
    if asked.num_nearest is not None and not 1 <= asked.num_nearest <= MAX_NEAREST:
        yield "acceptance.num_nearest", f"must be 1 to {MAX_NEAREST}"
    least_window = 1 if policy is AcceptancePolicy.FLY else 0
    if asked.window is not None and not least_window <= asked.window <= MAX_WINDOW:
        yield "acceptance.window", f"must be {least_window} to {MAX_WINDOW}"
    if asked.pool is not None and asked.pool not in set(RelevancePool):
        yield "acceptance.pool", "is not a known pool"
    if asked.threshold is not None and not -1 <= asked.threshold <= 1:
        yield "acceptance.threshold", "must be -1 to 1"
    if asked.threshold is not None and asked.pool != RelevancePool.THRESHOLD:
        yield "acceptance.threshold", "is for pool THRESHOLD only"
    if asked.entropy_threshold is not None and not 0 <= asked.entropy_threshold < float("inf"):
        yield "acceptance.entropy_threshold", "must be at least 0"
    if asked.variant is not None and asked.variant not in set(FlyVariant):
        yield "acceptance.variant", "is not a known variant"
    if asked.min_probability is not None and not 0 <= asked.min_probability <= 1:
        yield "acceptance.min_probability", "must be 0 to 1"


def _calibrated(lam: float, limits: AcceptanceLimits) -> float:
    """Returns the relevance that a share `lam` of calibration tokens stays below."""
    quantiles = () if limits.relevance is None else limits.relevance.quantiles
    if len(quantiles) < 2:
        raise FailedPrecondition(
            "the model has no calibration of relevance; say acceptance.threshold", reason="NOT_CALIBRATED"
        )
    place = lam * (len(quantiles) - 1)
    below = min(int(place), len(quantiles) - 2)
    return quantiles[below] + (place - below) * (quantiles[below + 1] - quantiles[below])


def _wire_name(name: str) -> str:
    return "lambda" if name == "lam" else name
