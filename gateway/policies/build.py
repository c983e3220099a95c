"""From what a request asks for, every default filled in, to the policy of its answer."""

from __future__ import annotations

from gateway.policies.base import Policy
from gateway.policies.exact import ExactPolicy
from gateway.policies.fly import FlyPolicy
from gateway.policies.fly_gate import FlyGatePolicy
from gateway.policies.guards import Guards, Vocabulary
from gateway.policies.lvspec import LvspecPolicy
from gateway.policies.random_control import RandomPolicy
from gateway.values import Acceptance, AcceptancePolicy


def build_policy(asked: Acceptance, vocabulary: Vocabulary) -> Policy:
    """Returns the policy."""
    guards = Guards(
        special=asked.guard_special,
        numbers=asked.guard_numbers,
        negations=asked.guard_negations,
        max_loose_run=asked.max_loose_run,
        min_probability=asked.min_probability,
    )
    match asked.policy:
        case AcceptancePolicy.LVSPEC:
            return LvspecPolicy(
                vocabulary, asked.lam, asked.num_nearest, asked.window, asked.pool, asked.threshold, guards
            )
        case AcceptancePolicy.RANDOM:
            return RandomPolicy(vocabulary, asked.lam, asked.window, asked.seed, guards)
        case AcceptancePolicy.FLY:
            return FlyPolicy(vocabulary, asked.window, asked.entropy_threshold, asked.variant, guards)
        case AcceptancePolicy.FLY_GATE:
            return FlyGatePolicy(vocabulary, asked.entropy_threshold, guards)
        case AcceptancePolicy.EXACT:
            return ExactPolicy()
