"""Figures over items, with intervals that come from drawing items anew (bootstrap)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.evaluation.methods import PLAIN
from bench.evaluation.records import Record
from bench.relevance import area_under_curve
from bench.world.facts import FACT_WORDS

NUM_RESAMPLES = 1000
Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """A method on a benchmark. Speed-ups are over plain decoding of the same items; intervals are of 95 %.

    `facts` is the share of what could be scored that is right; `fidelity` that share over the target's own;
    `agreement` is with what the target's own answer says.
    """

    method: str
    num_items: int
    accepted_per_round: float
    accepted_interval: Interval
    acceptance_per_pos: tuple[float, ...]
    rounds: float
    loose_share: float
    salvaged_share: float
    decode_speedup: float
    end_to_end_speedup: float
    facts: float
    fidelity: float
    fidelity_interval: Interval
    agreement: float
    equal_share: float


def summarise(records: Iterable[Record], benchmark: str, model: str) -> dict[str, Summary]:
    """Returns the figures of every method; each is compared with plain decoding of the items it has."""
    by_method: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in records:
        if (record.benchmark, record.model) == (benchmark, model):
            by_method[record.method][record.item] = record
    plain = by_method.get(PLAIN, {})
    return {
        name: _summary(name, [(own[item], plain[item]) for item in own if item in plain])
        for name, own in by_method.items()
        if own.keys() & plain.keys()
    }


def _summary(name: str, pairs: Sequence[tuple[Record, Record]]) -> Summary:
    own, plain = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    num_accepted = sum(record.num_accepted for record in own)
    num_rounds = sum(record.num_draft_rounds for record in own)
    return Summary(
        method=name,
        num_items=len(own),
        accepted_per_round=_t(own),
        accepted_interval=bootstrap(own, _t),
        acceptance_per_pos=tuple(count / num_rounds for count in _per_position(own)) if num_rounds else (),
        rounds=sum(record.num_rounds for record in own) / len(own),
        loose_share=sum(record.num_loose for record in own) / max(1, num_accepted),
        salvaged_share=sum(record.num_salvaged for record in own) / max(1, num_accepted),
        decode_speedup=_per_token(plain, lambda record: record.decode_ms) / _per_token(own, lambda one: one.decode_ms),
        end_to_end_speedup=_per_token(plain, _end_to_end_ms) / _per_token(own, _end_to_end_ms),
        facts=_facts(own),
        fidelity=_fidelity(pairs),
        fidelity_interval=bootstrap(pairs, _fidelity),
        agreement=sum(record.agreement for record in own) / len(own),
        equal_share=sum(record.is_equal_to_plain for record in own) / len(own),
    )


def bootstrap(values: Sequence[object], figure: Callable[..., float]) -> Interval:
    """Returns the 95 % interval of a figure of items drawn with replacement; the same for the same values."""
    chance = random.Random(len(values))
    drawn = sorted(figure(chance.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return drawn[int(0.025 * NUM_RESAMPLES)], drawn[int(0.975 * NUM_RESAMPLES) - 1]


def fact_difference(
    records: Iterable[Record], benchmark: str, model: str, one: str, other: str
) -> tuple[float, Interval]:
    """Returns how much truer `one` is than `other` on the items both have: share of facts, and its interval."""
    found: dict[str, dict[str, Record]] = {one: {}, other: {}}
    for record in records:
        if (record.benchmark, record.model) == (benchmark, model) and record.method in found:
            found[record.method][record.item] = record
    pairs = [(found[one][item], found[other][item]) for item in found[one] if item in found[other]]

    def difference(drawn: Sequence[tuple[Record, Record]]) -> float:
        return _facts([pair[0] for pair in drawn]) - _facts([pair[1] for pair in drawn])

    return (difference(pairs), bootstrap(pairs, difference)) if pairs else (0.0, (0.0, 0.0))


def relevance_auc(records: Iterable[Record]) -> float | None:
    """Returns the AUC of relevance as a detector of fact words in explained answers; None without any."""
    fact, filler = list[float](), list[float]()
    for record in records:
        for text, score in _scored_tokens(record):
            (fact if text.strip().lower() in FACT_WORDS else filler).append(score)
    return area_under_curve(fact, filler) if fact and filler else None


def _scored_tokens(record: Record) -> Iterable[tuple[str, float]]:
    if not record.details:
        return ()
    tokens = zip(record.details["texts"], record.details["relevance"], strict=True)
    return [(text, score) for text, score in tokens if score is not None]


def _t(records: Sequence[Record]) -> float:
    num_rounds = sum(record.num_draft_rounds for record in records)
    return sum(record.num_accepted for record in records) / num_rounds if num_rounds else 0.0


def _per_position(records: Sequence[Record]) -> list[int]:
    counts = [0] * max((len(record.accepted_per_pos) for record in records), default=0)
    for record in records:
        for place, count in enumerate(record.accepted_per_pos):
            counts[place] += count
    return counts


def _per_token(records: Sequence[Record], time_ms: Callable[[Record], float]) -> float:
    return sum(map(time_ms, records)) / max(1, sum(record.num_tokens for record in records))


def _end_to_end_ms(record: Record) -> float:
    return record.context_ms + record.ask_ms


def _facts(records: Sequence[Record]) -> float:
    total = sum(record.marks_total for record in records)
    return sum(record.marks_right for record in records) / total if total else 0.0


def _fidelity(pairs: Sequence[tuple[Record, Record]]) -> float:
    own = _facts([pair[1] for pair in pairs])
    return _facts([pair[0] for pair in pairs]) / own if own else 1.0
