"""What a policy asks to be measured at every place of a round, beside the target's choice there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.relevance import RelevanceSettings, log_probabilities, top_entropy, top_log_probabilities
from verifier_svc.round_guard import Measured, TopTokens

MAX_TOP = 20


@dataclass(frozen=True)
class Signals:
    """What to measure; `num_nearest` None takes the model's own setting."""

    relevance: bool = False
    num_nearest: int | None = None
    entropy: bool = False
    log_probabilities: bool = False
    num_top: int = 0


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
    return Measured(scores, entropy, drafts, targets, top_tokens(signals, logits))


def top_tokens(signals: Signals, logits: Tensor) -> tuple[TopTokens, ...]:
    """Returns the likeliest tokens of each place, when they are asked for."""
    if not signals.num_top:
        return ()
    token_ids, values = top_log_probabilities(logits, signals.num_top)
    return tuple(TopTokens(tuple(ids), tuple(row)) for ids, row in zip(token_ids, values, strict=True))


def measure_first(signals: Signals, logits: Tensor, token_id: int) -> Measured:
    """Returns what is told of the answer's first token, whose place has logits [1, vocab]."""
    targets = tuple(log_probabilities(logits, (token_id,)).tolist()) if signals.log_probabilities else ()
    return Measured(target_log_probabilities=targets, top=top_tokens(signals, logits))


def relevance_of(
    settings: RelevanceSettings, signals: Signals, states: Tensor, table: Tensor, *, num_drafts: int
) -> Tensor:
    """Returns the relevance of a round's places, [num_drafts + 1], from its hidden states [num_rows, hidden]."""
    places = states[settings.rows(num_drafts, states.shape[0])]
    return settings.scores(places, table, signals.num_nearest or settings.num_nearest)
