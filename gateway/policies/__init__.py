"""Acceptance policies: pure functions from a draft and the target's choices to what is committed."""

from gateway.policies.base import Decision, Policy
from gateway.policies.exact import ExactPolicy

__all__ = ["Decision", "ExactPolicy", "Policy"]
