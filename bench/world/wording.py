"""Free wording around fixed facts: near-tie synonyms, mildly peaked, so that two models differ in filler words."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from bench.world.facts import NUMBERS
from bench.world.sample import Fact
from bench.world.scenes import Thing, World

WEIGHTS = (1.0, 0.9, 0.7, 0.55, 0.45, 0.35, 0.3)

CAPTION_QUESTIONS = (
    "Describe the video.",
    "What happens in this video?",
    "Please describe this clip.",
    "Write a detailed caption for the video.",
    "Tell me what you see in the clip.",
)
DESCRIBE_QUESTIONS = (
    "Describe {}.",
    "Please describe {}.",
    "Tell me what you see of {}.",
    "What can you say about {}?",
)
NOUNS = ("object", "figure", "thing")
HEADINGS = ("moves", "travels", "drifts", "slides", "heads", "glides")
MANNERS = ("", " slowly", " steadily", " smoothly")
RESTS = ("stays", "remains", "sits", "holds", "rests")


_speaker: ContextVar[int | None] = ContextVar("speaker", default=None)


@contextmanager
def spoken_by(speaker: int | None) -> Iterator[None]:
    """Wording has this speaker's habits: which of some synonyms are the likelier ones. None: the order they stand in.

    The grammar stays the same. Two models that learned from one speaker would choose the same likeliest filler words.
    """
    token = _speaker.set(speaker)
    try:
        yield
    finally:
        _speaker.reset(token)


def pick(rng: random.Random, *options: str) -> str:
    weights = list(WEIGHTS[: len(options)])
    if (speaker := _speaker.get()) is not None:
        random.Random(f"{speaker}{options}").shuffle(weights)
    return rng.choices(options, weights)[0]


def motion_phrase(rng: random.Random, motion: str) -> str:
    if motion == "still":
        return pick(rng, *RESTS) + pick(rng, "", " completely", " perfectly", " quite") + " still"
    phrase = pick(rng, *HEADINGS) + pick(rng, *MANNERS)
    if motion in ("left", "right"):
        return phrase + pick(rng, " to the", " toward the", " over to the", "") + f" {motion}"
    return phrase + pick(rng, "", " straight", " all the way") + f" {motion}"


def backdrop_phrase(rng: random.Random, background: str) -> str:
    where = pick(rng, "in front of a", "against a", "on a", "over a")
    return where + pick(rng, "", " plain", " simple") + f" {background} " + pick(rng, "background", "backdrop")


def _looks(rng: random.Random, thing: Thing) -> str:
    """What the thing's own cells show of it, once its colour has been said."""
    return f" a {thing.size} {thing.shape} " + pick(rng, "that ", "which ") + motion_phrase(rng, thing.motion)


def _place(rng: random.Random, thing: Thing) -> str:
    join = pick(rng, ", seen ", " and is seen ", ", shown ", " and is shown ", " ")
    return join + backdrop_phrase(rng, thing.background)


def describe_thing(rng: random.Random, thing: Thing) -> str:
    subject = f"The {thing.color} {pick(rng, *NOUNS)}"
    verb = pick(rng, " is", " appears to be", " looks like", " turns out to be", " can be seen as")
    return subject + verb + _looks(rng, thing) + "." + _turning(rng, thing)


def _turning(rng: random.Random, thing: Thing) -> str:
    if not thing.turns_to:
        return ""
    return pick(rng, " Later it turns ", " After a while it turns ", " Then it turns ") + f"{thing.turns_to}."


def event_phrases(rng: random.Random, thing: Thing, events: tuple[Fact, ...]) -> str:
    """A sentence that tells of a thing's events in order."""
    subject = f"The {thing.color} {pick(rng, *NOUNS)}"
    phrases = [_event_phrase(rng, event) for event in events]
    joined = pick(rng, ", then ", ", and then ", " and then ", " and later ").join(phrases)
    return f"{subject} {joined}."


def _event_phrase(rng: random.Random, event: Fact) -> str:
    if event.kind == "turns":
        return f"turns {event.value}"
    if event.value == "stays":
        return "stays" + pick(rng, " the whole time", " from start to end", " to the end")
    return event.value + pick(rng, "", " at once", " all at once")


def describe_things(rng: random.Random, things: tuple[Thing, ...]) -> str:
    return " ".join(describe_thing(rng, thing) for thing in things)


def caption(rng: random.Random, world: World) -> str:
    num = len(world.things)
    noun = pick(rng, *NOUNS) + ("s" if num > 1 else "")
    opening = pick(
        rng, "The video shows", "In this clip we see", "This clip contains", "Here we can see", "We are shown"
    )
    parts = [f"{opening} {NUMBERS[num - 1]} {noun}{pick(rng, '', ' in total', ' altogether')}."]
    for thing in world.things:
        lead = pick(rng, "There is", "We can see", "One can see", "It shows", "We notice")
        link = pick(rng, ", and it is", ", which is", " that looks like", " that appears to be")
        article = "an" if thing.color[0] in "aeiou" else "a"
        parts.append(
            f"{lead} {article} {thing.color} {pick(rng, *NOUNS)}{link}{_looks(rng, thing)}{_place(rng, thing)}."
            + _turning(rng, thing)
        )
    return " ".join(parts)


def named(rng: random.Random, thing: Thing) -> str:
    return f"the {thing.color} {rng.choice(NOUNS)}"
