"""The exact policy: accept the longest prefix of the draft that the target would have chosen itself.

With shared noise (docs/sampling.md) equality of token ids is enough at any temperature, so the answer is that of plain
decoding whatever the drafter proposes (Sparse-to-Dense, arXiv 2505.19155).
"""

from __future__ import annotations

from gateway.policies.base import Decision
from gateway.values import Draft, Guarantee, Origin, Token, Verified


class ExactPolicy:
    """Longest matching prefix, then the verifier's token: recovered, bonus, or plain when nothing was drafted."""

    guarantee = Guarantee.LOSSLESS

    def decide(self, draft: Draft, verified: Verified) -> Decision:
        """Returns the decision of `Policy.decide`."""
        targets = verified.target_token_ids
        num_accepted = longest_matching_prefix(draft.token_ids, targets)
        accepted = tuple(Token(token_id, Origin.ACCEPTED) for token_id in draft.token_ids[:num_accepted])
        origin = _origin_of_own_token(num_accepted, len(draft.token_ids))
        return Decision(num_accepted, (*accepted, Token(targets[num_accepted], origin)))


def longest_matching_prefix(draft_token_ids: tuple[int, ...], target_token_ids: tuple[int, ...]) -> int:
    """Returns how many leading draft tokens equal the target's."""
    for index, (drafted, target) in enumerate(zip(draft_token_ids, target_token_ids, strict=False)):
        if drafted != target:
            return index
    return len(draft_token_ids)


def _origin_of_own_token(num_accepted: int, num_draft_tokens: int) -> Origin:
    if num_draft_tokens == 0:
        return Origin.PLAIN
    return Origin.BONUS if num_accepted == num_draft_tokens else Origin.RECOVERED
