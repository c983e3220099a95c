"""Questions about a world and their right answers."""

import random
from collections.abc import Callable

from bench.world.facts import NUMBERS, WORDS_BY_FACT
from bench.world.sample import LOOKS, Fact, Sample, asked_things, thing_facts
from bench.world.scenes import Thing, World
from bench.world.wording import (
    CAPTION_QUESTIONS,
    DESCRIBE_QUESTIONS,
    caption,
    describe_things,
    motion_phrase,
    named,
    pick,
)

ONE_WORD = " Answer in one word."
LETTERS = "ABCD"
ASKABLE = ("shape", "size", "motion")
ASK = {
    "shape": ("What shape is {}?", "Which shape does {} have?"),
    "size": ("How big is {}?", "What size is {}?"),
    "motion": ("How does {} move?", "Which way does {} move?", "In what direction does {} go?"),
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
        return _ask_yes_no(rng, world)
    if roll < 0.27:
        return _ask_count(rng, world)
    return _ask_fact(rng, world)


def ask_multiple_choice(rng: random.Random, world: World) -> Sample:
    kind, thing = rng.choice(("shape", "motion")), rng.choice(world.things)
    right = getattr(thing, kind)
    options = [right, *rng.sample([word for word in WORDS_BY_FACT[kind] if word != right], 3)]
    rng.shuffle(options)
    listed = " ".join(f"{letter}. {word}" for letter, word in zip(LETTERS, options, strict=True))
    question = f"{rng.choice(ASK[kind]).format(named(rng, thing))} Options: {listed}. Answer with the letter."
    letter = LETTERS[options.index(right)]
    return _sample(world, "multiple_choice", question, letter, (Fact("choice", thing.color, letter),))


ASKERS: dict[str, Callable[[random.Random, World], Sample]] = {
    "caption": ask_caption,
    "describe": ask_describe,
    "question": ask_question,
    "multiple_choice": ask_multiple_choice,
}


def _ask_fact(rng: random.Random, world: World) -> Sample:
    kind, thing = rng.choice(ASKABLE), rng.choice(world.things)
    question, value = rng.choice(ASK[kind]).format(named(rng, thing)), getattr(thing, kind)
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
    return f"{subject} {motion_phrase(rng, thing.motion)}."


def _ask_count(rng: random.Random, world: World) -> Sample:
    number = NUMBERS[len(world.things) - 1]
    question = rng.choice(("How many objects are there?", "How many things can you count?", "Count the objects."))
    answer = pick(rng, f"There are {number} in total.", f"The clip has {number}.", f"I count {number}.")
    return _sample(world, "question", question, answer, (Fact("count", None, number),))


def _ask_yes_no(rng: random.Random, world: World) -> Sample:
    thing, right = rng.choice(world.things), rng.random() < 0.5
    kind = rng.choice(("color", "shape", "size", "motion"))
    taken = [other.color for other in world.things] if kind == "color" else [getattr(thing, kind)]
    wrong = [word for word in WORDS_BY_FACT[kind] if word not in taken]
    right = right or not wrong
    value = getattr(thing, kind) if right else rng.choice(wrong)
    asked = {
        "color": f"Is there a {value} object?",
        "shape": f"Is {named(rng, thing)} a {value}?",
        "size": f"Is {named(rng, thing)} {value}?",
        "motion": f"Does {named(rng, thing)} {'stay' if value == 'still' else 'move'} {value}?",
    }[kind]
    color = value if kind == "color" else thing.color
    key = (Fact("yes_no", color, "yes" if right else "no"),)
    return _sample(world, "question", asked, "Yes." if right else "No.", key)


def _sample(world: World, kind: str, question: str, answer: str, key: tuple[Fact, ...]) -> Sample:
    sample = Sample(world.seed, kind, question, answer, key, False, world)
    things = asked_things(sample)
    brief = bool(things) and all(thing.brief for thing in things)
    return Sample(world.seed, kind, question, answer, key, brief, world)
