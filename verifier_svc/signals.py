"""What a policy asks to be measured at every place of a round, beside the target's choice there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.relevance import RelevanceSettings, log_probabilities, top_entropy
from verifier_svc.round_guard import Measured


@dataclass(frozen=True)
class Signals:
    """What to measure; `num_nearest` None takes the model's own setting."""

    relevance: bool = False
    num_nearest: int | None = None
    entropy: bool = False
    log_probabilities: bool = False


def measure(
    signals: Signals,
    *,
    logits: Tensor,
    draft_token_ids: tuple[int, ...],
    target_token_ids: tuple[int, ...],
    relevance: Tensor | None,
) -> Measured:
    """Returns what was asked for of a round's places: logits [num_drafts + 1, vocab], relevance [num_drafts + 1]."""
    drafts = targets = entropy = ()
    if signals.log_probabilities:
        drafts = tuple(log_probabilities(logits, draft_token_ids).tolist())
        targets = tuple(log_probabilities(logits, target_token_ids).tolist())
    if signals.entropy:
        entropy = tuple(top_entropy(logits).tolist())
    scores = () if relevance is None else tuple(relevance.tolist())
    return Measured(scores, entropy, drafts, targets)


def relevance_of(
    settings: RelevanceSettings, signals: Signals, states: Tensor, table: Tensor, *, num_drafts: int
) -> Tensor:
    """Returns the relevance of a round's places, [num_drafts + 1], from its hidden states [num_rows, hidden]."""
    places = states[settings.rows(num_drafts, states.shape[0])]
    return settings.scores(places, table, signals.num_nearest or settings.num_nearest)
