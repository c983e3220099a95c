"""Questions about a world and their right answers."""

import random
import re
from collections.abc import Callable, Sequence

from bench.world.facts import NUMBERS, WORDS_BY_FACT
from bench.world.sample import LOOKS, Fact, Sample, asked_things, thing_events, thing_facts
from bench.world.scenes import Thing, World
from bench.world.wording import (
    CAPTION_QUESTIONS,
    DESCRIBE_QUESTIONS,
    backdrop_phrase,
    caption,
    describe_things,
    event_phrases,
    motion_phrase,
    named,
    pick,
)

ONE_WORD = " Answer in one word."
EXPLAIN = " Explain, then answer."
LETTERS = "ABCD"
ASKABLE = ("shape", "size", "motion")
CHOOSABLE = ("shape", "motion")
MIN_PAIRS_BETWEEN = 3  # frame pairs between the appearances of two things whose order is asked for
ASK = {
    "shape": ("What shape is {}?", "Which shape does {} have?"),
    "size": ("How big is {}?", "What size is {}?"),
    "motion": ("How does {} move?", "Which way does {} move?", "In what direction does {} go?"),
    "background": ("What background is {} on?", "What is behind {}?"),
}


def ask_caption(rng: random.Random, world: World) -> Sample:
    count = Fact("count", None, NUMBERS[len(world.things) - 1])
    key = (count, *(fact for thing in world.things for fact in thing_facts(thing)))
    return _sample(world, "caption", rng.choice(CAPTION_QUESTIONS), caption(rng, world), key)


def ask_describe(rng: random.Random, world: World) -> Sample:
    things = tuple(rng.sample(world.things, min(rng.choice((1, 1, 2, 2, 3)), len(world.things))))
    names = " and ".join(named(rng, thing) for thing in things)
    key = tuple(fact for thing in things for fact in thing_facts(thing, LOOKS))
    question = rng.choice(DESCRIBE_QUESTIONS).format(names)
    return _sample(world, "describe", question, describe_things(rng, things), key)


def ask_question(rng: random.Random, world: World) -> Sample:
    roll = rng.random()
    if roll < 0.2:
        return ask_yes_no(rng, world)
    if roll < 0.27:
        return _ask_count(rng, world)
    if roll < 0.37 and (pair := _apart(rng, world)):
        return _ask_order(rng, world, pair)
    return _ask_fact(rng, world, rng.choice(ASKABLE), rng.choice(world.things))


def ask_background(rng: random.Random, world: World) -> Sample:
    return _ask_fact(rng, world, "background", rng.choice(world.things))


def ask_multiple_choice(rng: random.Random, world: World) -> Sample:
    kind, thing = rng.choice(CHOOSABLE), rng.choice(world.things)
    asked, letter = _choice(rng, kind, thing)
    key = (Fact("choice", thing.color, letter),)
    return _sample(world, "multiple_choice", f"{asked} Answer with the letter.", letter, key)


def ask_explained(rng: random.Random, world: World) -> Sample:
    """A multiple choice or a yes/no whose answer says first what is seen: comparing is learned from these."""
    if rng.random() < 0.5:
        kind, thing = rng.choice(CHOOSABLE), rng.choice(world.things)
        asked, letter = _choice(rng, kind, thing)
        answer = f"{_full_answer(rng, kind, thing)} So {letter}"
        return _sample(world, "explained", asked + EXPLAIN, answer, (Fact("choice", thing.color, letter),))
    thing = rng.choice(world.things)
    kind, value, word = _claim(rng, rng.choice(ASKABLE), thing, world)
    answer = f"{_full_answer(rng, kind, thing)} So {word}."
    key = (Fact("yes_no", thing.color, word),)
    return _sample(world, "explained", _asked_claim(rng, kind, value, thing) + EXPLAIN, answer, key)


def _choice(rng: random.Random, kind: str, thing: Thing) -> tuple[str, str]:
    """A question with four options, and the right one's letter."""
    right = getattr(thing, kind)
    options = [right, *rng.sample([word for word in WORDS_BY_FACT[kind] if word != right], 3)]
    rng.shuffle(options)
    asked = rng.choice(ASK[kind]).format(named(rng, thing))
    return f"{asked} Options: {listed_options(options)}.", LETTERS[options.index(right)]


def listed_options(words: Sequence[str]) -> str:
    return " ".join(f"{letter}. {word}" for letter, word in zip(LETTERS, words, strict=True))


def ask_chain(rng: random.Random, world: World) -> list[Sample]:
    """Two or three turns about one thing, which only the first one names."""
    thing = rng.choice(world.things)
    first, *others = rng.sample((*ASKABLE, "background"), rng.choice((2, 3)))
    turns = [_ask_fact(rng, world, first, thing)]
    return turns + [_ask_fact(rng, world, kind, thing, name="it") for kind in others]


def _ask_fact(rng: random.Random, world: World, kind: str, thing: Thing, *, name: str | None = None) -> Sample:
    question, value = rng.choice(ASK[kind]).format(name or named(rng, thing)), getattr(thing, kind)
    key = (Fact(kind, thing.color, value),)
    if rng.random() < 0.4:
        return _sample(world, "question", question + ONE_WORD, value, key)
    return _sample(world, "question", question, _full_answer(rng, kind, thing), key)


def _full_answer(rng: random.Random, kind: str, thing: Thing) -> str:
    subject = "The" + named(rng, thing)[3:]
    if kind == "shape":
        return f"{subject} is a {thing.shape}."
    if kind == "size":
        return f"{subject} is {pick(rng, '', 'rather ', 'quite ')}{thing.size}."
    if kind == "background":
        return f"{subject} is {backdrop_phrase(rng, thing.background)}."
    return f"{subject} {motion_phrase(rng, thing.motion)}."


def _ask_count(rng: random.Random, world: World) -> Sample:
    number = NUMBERS[len(world.things) - 1]
    question = rng.choice(("How many objects are there?", "How many things can you count?", "Count the objects."))
    answer = pick(rng, f"There are {number} in total.", f"The clip has {number}.", f"I count {number}.")
    return _sample(world, "question", question, answer, (Fact("count", None, number),))


def _apart(rng: random.Random, world: World) -> tuple[Thing, Thing] | None:
    """Two things of which one appears clearly before the other, in random order."""
    pairs = [
        (one, other)
        for one in world.things
        for other in world.things
        if abs(one.first_pair - other.first_pair) >= MIN_PAIRS_BETWEEN
    ]
    return rng.choice(pairs) if pairs else None


def _ask_order(rng: random.Random, world: World, pair: tuple[Thing, Thing]) -> Sample:
    one, other = pair
    first = min(pair, key=lambda thing: thing.first_pair)
    names = named(rng, one), named(rng, other)
    question = rng.choice(("Which appears first, {} or {}?", "What comes first, {} or {}?")).format(*names)
    answer = "The" + named(rng, first)[3:] + pick(rng, " appears first.", " comes first.")
    return _sample(world, "question", question, answer, (Fact("order", first.color, first.color),))


def ask_event(rng: random.Random, world: World) -> Sample:
    thing = rng.choice(world.things)
    events = thing_events(world, thing)
    question = rng.choice(("What happens to {}?", "Tell me what happens to {}.")).format(named(rng, thing))
    return _sample(world, "event", question, event_phrases(rng, thing, events), events)


def ask_yes_no(rng: random.Random, world: World) -> Sample:
    thing = rng.choice(world.things)
    kind, value, word = _claim(rng, rng.choice(("color", *ASKABLE)), thing, world)
    color = value if kind == "color" else thing.color
    key = (Fact("yes_no", color, word),)
    return _sample(world, "question", _asked_claim(rng, kind, value, thing), f"{word.capitalize()}.", key)


def _claim(rng: random.Random, kind: str, thing: Thing, world: World) -> tuple[str, str, str]:
    """A kind of fact, a value claimed for it, and whether that is so: "yes" or "no"."""
    shown = [color for other in world.things for color in (other.color, other.turns_to)]
    taken = shown if kind == "color" else [getattr(thing, kind)]
    wrong = [word for word in WORDS_BY_FACT[kind] if word not in taken]
    right = rng.random() < 0.5 or not wrong
    return kind, getattr(thing, kind) if right else rng.choice(wrong), "yes" if right else "no"


def unsaid_word(sample: Sample) -> str | None:
    """The fact that a bare letter, yes or no rests on; None for other answers, and where a colour is asked about."""
    fact = sample.key[0]
    if sample.kind == "explained" or fact.kind not in ("choice", "yes_no"):
        return None
    if fact.kind == "choice":
        options: dict[str, str] = dict(re.findall(r"([A-D])\. (\w+)", sample.question))
        return options[fact.value]
    kinds = [kind for kind in ASKABLE if set(re.findall(r"\w+", sample.question)) & set(WORDS_BY_FACT[kind])]
    if not kinds or fact.color is None:
        return None
    word: str = getattr(sample.world.thing(fact.color), kinds[0])
    return word


def _asked_claim(rng: random.Random, kind: str, value: str, thing: Thing) -> str:
    name = named(rng, thing)
    return {
        "color": f"Is there {'an' if value[0] in 'aeiou' else 'a'} {value} object?",
        "shape": f"Is {name} a {value}?",
        "size": f"Is {name} {value}?",
        "motion": f"Does {name} {'stay' if value == 'still' else 'move'} {value}?",
    }[kind]


def _sample(world: World, kind: str, question: str, answer: str, key: tuple[Fact, ...]) -> Sample:
    sample = Sample(world.seed, kind, question, answer, key, False, world)
    things = asked_things(sample)
    brief = bool(things) and all(thing.brief for thing in things)
    return Sample(world.seed, kind, question, answer, key, brief, world)


ASKERS: dict[str, Callable[[random.Random, World], Sample]] = {
    "caption": ask_caption,
    "describe": ask_describe,
    "question": ask_question,
    "multiple_choice": ask_multiple_choice,
    "yes_no": ask_yes_no,
    "event": ask_event,
    "explained": ask_explained,
}
