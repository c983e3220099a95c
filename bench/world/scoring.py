"""Reads the facts back from an answer and compares them with the truth, without a judge."""

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, field

from bench.world.facts import COLORS, EVENTS, NUMBERS, WORDS_BY_FACT
from bench.world.sample import Fact, Sample

THING_FACTS = ("size", "shape", "motion", "background")


@dataclass
class Described:
    """What a text says: how many things, and each colour's facts (the first word of each kind counts)."""

    count: str | None = None
    things: dict[str, dict[str, str]] = field(default_factory=dict)


def parse(text: str) -> Described:
    """Facts belong to the last colour named before them."""
    out = Described()
    current: dict[str, str] = {}
    before = ""
    for word in re.findall(r"[a-z]+", text.lower()):
        if word in COLORS and before == "turns":
            current.setdefault("turns", word)
        elif word in COLORS:
            current = out.things.setdefault(word, {})
        elif word in NUMBERS and not out.things:
            out.count = out.count or word
        else:
            for kind in THING_FACTS:
                if word in WORDS_BY_FACT[kind]:
                    current.setdefault(kind, word)
        before = word
    return out


def score(sample: Sample, text: str) -> dict[str, list[int]]:
    """1 or 0 for every fact of the key, by kind; a described thing that was not asked about adds a 0 to "color"."""
    if sample.kind in ("caption", "describe"):
        return _score_description(sample, text)
    if sample.kind == "event":
        return _score_events(sample, text)
    fact = sample.key[0]
    if sample.kind == "explained":
        text = text.rpartition("So ")[2]
    return {fact.kind: [int(_short_answer(fact, text) == fact.value)]}


def facts(sample: Sample, text: str) -> float:
    """Share of the facts that are right."""
    marks = [mark for kind in score(sample, text).values() for mark in kind]
    return sum(marks) / len(marks)


def _score_description(sample: Sample, text: str) -> dict[str, list[int]]:
    said = parse(text)
    marks: defaultdict[str, list[int]] = defaultdict(list)
    for fact in sample.key:
        marks[fact.kind].append(int(_states(said, fact)))
    extra = set(said.things) - {fact.color for fact in sample.key}
    marks["color"] += [0] * len(extra)
    return dict(marks)


def _states(said: Described, fact: Fact) -> bool:
    if fact.kind == "count":
        return said.count == fact.value
    if fact.color not in said.things:
        return False
    return fact.kind == "color" or said.things[fact.color].get(fact.kind) == fact.value


def _score_events(sample: Sample, text: str) -> dict[str, list[int]]:
    """An event that did not happen adds a 0 to its kind."""
    words = re.findall(r"[a-z]+", text.lower())
    turned = {word for before, word in itertools.pairwise(words) if before == "turns" and word in COLORS}
    said = {"event": set(words) & set(EVENTS), "turns": turned}
    marks: defaultdict[str, list[int]] = defaultdict(list)
    for fact in sample.key:
        marks[fact.kind].append(int(fact.value in said[fact.kind]))
    for kind, values in said.items():
        marks[kind] += [0] * len(values - {fact.value for fact in sample.key if fact.kind == kind})
    return {kind: values for kind, values in marks.items() if values}


def _short_answer(fact: Fact, text: str) -> str | None:
    words = re.findall(r"[A-Za-z]+", text)
    if fact.kind == "choice":
        return words[0] if words else None
    lowered = [word.lower() for word in words]
    if fact.kind == "yes_no":
        return lowered[0] if lowered else None
    found = [word for word in lowered if word in (COLORS if fact.kind == "order" else WORDS_BY_FACT[fact.kind])]
    return found[-1] if found else None
