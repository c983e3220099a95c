"""What LVSpec and its random control share: some places are strict, a mismatch elsewhere is kept as it was drafted.

A strict mismatch may still be salvaged when it is only shifted (position-shift tolerance): the target's token stands
elsewhere in the draft, or the draft's among the target's, at most `window` places away. Nothing moves: the token is
kept where it was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.policies.base import Decision, Memory
from gateway.policies.guards import Guards, Vocabulary
from gateway.policies.walk import walk
from gateway.values import Draft, Origin, Verified


def relax(
    draft: Draft,
    verified: Verified,
    memory: Memory,
    *,
    is_strict: Sequence[bool],
    window: int,
    guards: Guards,
    vocabulary: Vocabulary,
) -> Decision:
    """Returns the decision when the places of the draft where `is_strict` must match, or be shifted."""

    def verdict(index: int, num_loose_run: int) -> Origin | None:
        if guards.forbid(draft, verified, index, num_loose_run=num_loose_run, vocabulary=vocabulary):
            return None
        if not is_strict[index]:
            return Origin.LOOSE
        return Origin.SALVAGED if is_shifted(draft.token_ids, verified.target_token_ids, index, window) else None

    return walk(draft, verified, memory, verdict)


def is_shifted(drafted: tuple[int, ...], targets: tuple[int, ...], index: int, window: int) -> bool:
    """Returns whether the mismatch at `index` is one of place only, by at most `window` places."""
    near = [place for place in range(max(0, index - window), index + window + 1) if place != index]
    return any(place < len(drafted) and drafted[place] == targets[index] for place in near) or any(
        place < len(targets) and targets[place] == drafted[index] for place in near
    )


def strictest(scores: Sequence[float], num_strict: int) -> list[bool]:
    """Returns which scores are among the `num_strict` largest; of equal ones the earlier is."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    chosen = set(order[:num_strict])
    return [index in chosen for index in range(len(scores))]
