"""Acceptance policies: pure functions from a draft and the target's choices to what is committed.

base    the seam                walk       the walk along a draft, common to all
exact   matches only            guards     mismatches that are never kept
lvspec  by visual relevance     relaxed    strict places and shifted tokens, common to lvspec and its control
fly     by the target's doubt   fly_gate   doubt alone              random_control   the control
build   from a request's parameters to a policy
"""

from gateway.policies.base import LOOSE_ORIGINS, Decision, Memory, Policy, guarantee_of
from gateway.policies.build import build_policy
from gateway.policies.exact import ExactPolicy
from gateway.policies.fly import FlyPolicy
from gateway.policies.fly_gate import FlyGatePolicy
from gateway.policies.guards import Guards, Vocabulary, WordKind
from gateway.policies.lvspec import LvspecPolicy
from gateway.policies.random_control import RandomPolicy

__all__ = [
    "LOOSE_ORIGINS",
    "Decision",
    "ExactPolicy",
    "FlyGatePolicy",
    "FlyPolicy",
    "Guards",
    "LvspecPolicy",
    "Memory",
    "Policy",
    "RandomPolicy",
    "Vocabulary",
    "WordKind",
    "build_policy",
    "guarantee_of",
]
