"""The walk along a draft that all policies share; they differ in what they say about a mismatch.

matches the target's choice           accepted
mismatch, the policy keeps it         loose or salvaged, and the walk goes on: the target has read it too
mismatch, the policy rejects it       the verifier's token is recovered in its place, the rest is dropped
end of the draft                      the verifier's token after it is a bonus
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from gateway.policies.base import LOOSE_ORIGINS, Decision, Memory
from gateway.values import Draft, Origin, Place, Token, Verified

T = TypeVar("T")
# What to do with the mismatch at a place of the draft: LOOSE or SALVAGED keeps it, None rejects it. `num_loose_run` is
# the number of mismatches kept in a row right before it.
Verdict = Callable[[int, int], Origin | None]


def walk(draft: Draft, verified: Verified, memory: Memory, verdict: Verdict) -> Decision:
    """Returns the decision; its memory counts the round."""
    place = _places(verified, memory.num_rounds + 1)
    tokens: list[Token] = []
    num_loose_run = 0  # every round ends with a token of the verifier's own, so no run crosses rounds
    recovered_from: int | None = None
    for index, (drafted, target) in enumerate(zip(draft.token_ids, verified.target_token_ids, strict=False)):
        origin = Origin.ACCEPTED if drafted == target else verdict(index, num_loose_run)
        if origin is None:
            recovered_from = drafted
            break
        num_loose_run = num_loose_run + 1 if origin in LOOSE_ORIGINS else 0
        tokens.append(Token(drafted, origin, place(index, origin, drafted, target)))
    num_accepted = len(tokens)
    own, origin = verified.target_token_ids[num_accepted], _origin_of_own_token(num_accepted, len(draft.token_ids))
    at_own = replace(place(num_accepted, origin, own, own), draft_token_id=recovered_from)
    after = replace(memory, num_rounds=memory.num_rounds + 1)
    return Decision(num_accepted, (*tokens, Token(own, origin, at_own)), after)


def _origin_of_own_token(num_accepted: int, num_draft_tokens: int) -> Origin:
    if num_draft_tokens == 0:
        return Origin.PLAIN
    return Origin.BONUS if num_accepted == num_draft_tokens else Origin.RECOVERED


def _places(verified: Verified, round_number: int) -> Callable[[int, Origin, int, int], Place]:
    """Returns what tells of a committed token what was measured at its place."""
    measured = verified.measured

    def place(index: int, origin: Origin, token_id: int, target: int) -> Place:
        is_draft = token_id != target
        log_probabilities = measured.draft_log_probabilities if is_draft else measured.target_log_probabilities
        return Place(
            round=round_number,
            relevance=_at(measured.relevance, index),
            entropy=_at(measured.entropy, index),
            log_probability=_at(log_probabilities, index),
            target_token_id=target if origin in LOOSE_ORIGINS else None,
            top=_at(measured.top, index),
        )

    return place


def _at(values: tuple[T, ...], index: int) -> T | None:
    return values[index] if index < len(values) else None
