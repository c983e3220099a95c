"""Speeds that costs and acceptance lead to: plain, drafted in turn with verifying, drafted while verifying.

In turn:    a round is a draft, a verification, and the way between.
Overlapped: while a draft is verified, the drafter goes on from it on its own device, guessing the verifier's token. Is
            all accepted and the guess right, what was drafted meanwhile is the next draft, or its beginning; else it is
            thrown away. The expectation is over a simulation, its seed fixed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.planning.costs import Costs

MAX_DRAFT_TOKENS = 16
_NUM_REPEATS = 50  # of the answers that are simulated
_NUM_TOKENS = 20_000  # of a simulated answer


@dataclass(frozen=True)
class Choice:
    """A draft length and the milliseconds per token that it leads to."""

    num_draft_tokens: int
    ms_per_token: float


def accepted(acceptance: Sequence[float], num_draft_tokens: int) -> float:
    """Returns T: `acceptance` is by place, given the places before; the last one stands for all that follow."""
    total, reached = 0.0, 1.0
    for place in range(num_draft_tokens):
        reached *= acceptance[min(place, len(acceptance) - 1)]
        total += reached
    return total


def plain_ms(costs: Costs) -> float:
    """Returns milliseconds per token of plain decoding."""
    return costs.verify.at(0) + costs.plain_overhead


def in_turn_ms(costs: Costs, acceptance: Sequence[float], num_draft_tokens: int) -> float:
    """Returns milliseconds per token of drafting and verifying one after the other."""
    if num_draft_tokens == 0:
        return plain_ms(costs)
    round_ms = costs.draft.at(num_draft_tokens) + costs.verify.at(num_draft_tokens) + costs.drafted_overhead
    return round_ms / (accepted(acceptance, num_draft_tokens) + 1)


def answers_ms(
    costs: Costs,
    acceptance: Sequence[float],
    num_draft_tokens: int,
    *,
    answer_lens: Sequence[int],
    max_tokens: int,
    seed: int = 0,
) -> float:
    """Returns milliseconds per token of answers of these lengths, drafted in turn.

    What a draft holds behind the end of an answer is lost, and no draft goes beyond `max_tokens`: both weigh in short
    answers. The first token of an answer is not decoded, the one that ends it is.
    """
    rng, spent_ms, num_decoded = random.Random(seed), 0.0, 0
    for answer_len in [*answer_lens] * _NUM_REPEATS:
        done = 1
        while done < answer_len:
            length = max(0, min(num_draft_tokens, max_tokens - done - 1))
            spent_ms += costs.verify.at(length) + (
                costs.draft.at(length) + costs.drafted_overhead if length else costs.plain_overhead
            )
            num_accepted = 0
            while num_accepted < length and rng.random() < acceptance[min(num_accepted, len(acceptance) - 1)]:
                num_accepted += 1
            done += num_accepted + 1
        num_decoded += answer_len - 1
    return spent_ms / max(1, num_decoded)


def overlapped_ms(costs: Costs, acceptance: Sequence[float], num_draft_tokens: int, *, seed: int = 0) -> float:
    """Returns milliseconds per token of drafting on while verifying."""
    if num_draft_tokens == 0:
        return plain_ms(costs)
    rng, each = random.Random(seed), max(costs.draft.each, 1e-6)
    spent_ms, num_tokens, ready = 0.0, 0, 0.0
    while num_tokens < _NUM_TOKENS:
        missing = max(0.0, num_draft_tokens - ready)
        started_ms = costs.draft.at_zero if ready == 0 else 0.0
        verify_ms = costs.verify.at(num_draft_tokens) + costs.drafted_overhead
        spent_ms += started_ms + missing * each + verify_ms
        num_accepted = 0
        while num_accepted < num_draft_tokens and rng.random() < acceptance[min(num_accepted, len(acceptance) - 1)]:
            num_accepted += 1
        num_tokens += num_accepted + 1
        is_right = num_accepted == num_draft_tokens and rng.random() < acceptance[-1]
        ahead = max(0.0, ready - num_draft_tokens) + verify_ms / each
        ready = max(0.0, min(ahead, 2 * MAX_DRAFT_TOKENS) - 1) if is_right else 0.0
        if not is_right:
            spent_ms += each / 2  # the drafter's running step ends first
    return spent_ms / num_tokens


def best_in_turn(costs: Costs, acceptance: Sequence[float]) -> Choice:
    """Returns the best draft length; 0 is plain decoding."""
    lengths = range(MAX_DRAFT_TOKENS + 1)
    return min((Choice(n, in_turn_ms(costs, acceptance, n)) for n in lengths), key=lambda choice: choice.ms_per_token)


def best_overlapped(costs: Costs, acceptance: Sequence[float]) -> Choice:
    """Returns the best draft length when drafting goes on while verifying; 0 is plain decoding."""
    lengths = range(MAX_DRAFT_TOKENS + 1)
    return min(
        (Choice(n, overlapped_ms(costs, acceptance, n)) for n in lengths), key=lambda choice: choice.ms_per_token
    )
