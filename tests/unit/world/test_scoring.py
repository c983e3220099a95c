import itertools
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.world import KINDS, Plan, Sample, facts, held_out, sample_world, score
from bench.world.facts import WORDS_BY_FACT
from bench.world.questions import ASKERS, ask_background, ask_chain
from bench.world.scoring import parse
from bench.world.wording import spoken_by

PAIRS = (2, 8, 48)
BRIEF = (None, True, False)


def samples(kind: str, num: int) -> list[Sample]:
    return [
        held_out(kind, index, num_frame_pairs=PAIRS[index % 3], brief=BRIEF[index // 3 % 3]) for index in range(num)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_parser_reads_every_fact_back(kind: str) -> None:
    for sample in samples(kind, 2000):
        assert facts(sample, sample.answer) == 1.0, (sample.question, sample.answer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parser_reads_turning_worlds_back(kind: str) -> None:
    rng = random.Random(kind)
    for seed in range(1000):
        world = sample_world(seed, Plan(PAIRS[seed % 3], max_things=1 + seed % 6, turning_share=0.5))
        sample = ASKERS[kind](rng, world)
        assert facts(sample, sample.answer) == 1.0, (sample.question, sample.answer)


def test_the_parser_reads_chains_and_backgrounds_back() -> None:
    rng = random.Random(1)
    for seed in range(1000):
        world = sample_world(seed, Plan(PAIRS[seed % 3], max_things=6))
        for sample in (*ask_chain(rng, world), ask_background(rng, world)):
            assert facts(sample, sample.answer) == 1.0, (sample.question, sample.answer)


def test_every_speaker_has_own_habits_in_the_same_grammar() -> None:
    world = sample_world(1, Plan(12))
    openings: dict[int, Counter[str]] = {}
    for speaker in range(4):
        rng = random.Random(2)
        with spoken_by(speaker):
            samples = [ASKERS["caption"](rng, world) for _ in range(200)]
        assert all(facts(sample, sample.answer) == 1.0 for sample in samples)
        openings[speaker] = Counter(sample.answer.partition(" ")[0] for sample in samples)
    assert len({counts.most_common(1)[0][0] for counts in openings.values()}) > 1
    usual, again = (ASKERS["caption"](random.Random(2), world).answer for _ in range(2))
    assert usual == again  # a speaker's habits end with the block


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 10**9), st.sampled_from(KINDS), st.integers(2, 60), st.floats(0, 1), st.integers(0, 10**6))
def test_a_swapped_fact_word_never_scores_full_marks(
    seed: int, kind: str, num_pairs: int, turning: float, pick: int
) -> None:
    """Exact both ways: not only does the right answer score 1, an answer with one wrong fact word scores less."""
    rng = random.Random(pick)
    world = sample_world(seed, Plan(num_pairs, max_things=6, turning_share=turning))
    sample = ASKERS[kind](rng, world)
    words = {word for fact in sample.key for word in [fact.value] if fact.kind in (*WORDS_BY_FACT, "turns")}
    spoken = [word for word in re.findall(r"[a-z]+", sample.answer) if word in words]
    if not spoken:
        return
    right = rng.choice(spoken)
    group = next(group for group in WORDS_BY_FACT.values() if right in group)
    wrong = rng.choice([word for word in group if word not in sample.answer.lower()] or ["nothing"])
    assert facts(sample, re.sub(rf"\b{right}\b", wrong, sample.answer)) < 1.0


def test_another_videos_answer_scores_low() -> None:
    captions = samples("caption", 300)
    shares = [facts(sample, other.answer) for sample, other in itertools.pairwise(captions)]
    assert sum(shares) / len(shares) < 0.3


def test_fact_words_are_fifteen_to_twenty_percent_of_a_caption() -> None:
    captions = samples("caption", 500)
    num_words = sum(len(sample.answer.replace(",", " ,").replace(".", " .").split()) for sample in captions)
    assert 0.15 < sum(len(sample.key) for sample in captions) / num_words < 0.20


def test_one_wrong_word_costs_one_fact() -> None:
    sample = held_out("describe", 0, num_frame_pairs=8)
    right = next(fact.value for fact in sample.key if fact.kind == "shape")
    wrong = "bar" if right != "bar" else "ring"
    marks = score(sample, sample.answer.replace(right, wrong, 1))
    assert sum(mark for values in marks.values() for mark in values) == len(sample.key) - 1
    assert marks["shape"][0] == 0


def test_a_thing_that_was_not_asked_about_costs_a_mark() -> None:
    sample = held_out("caption", 0, num_frame_pairs=8)
    unseen = next(color for color in ("red", "green", "blue", "yellow", "purple") if color not in sample.answer)
    marks = score(sample, f"{sample.answer} There is a {unseen} object.")
    assert marks["color"] == [1] * len(sample.world.things) + [0]


def test_a_missing_thing_costs_all_its_facts() -> None:
    sample = held_out("describe", 0, num_frame_pairs=8)
    assert facts(sample, "") == 0.0


def test_the_first_word_of_a_kind_counts() -> None:
    said = parse(
        "There are two objects. The red object is a small circle and a bar that moves left on a navy background."
    )
    assert said.count == "two"
    assert said.things == {"red": {"size": "small", "shape": "circle", "motion": "left", "background": "navy"}}


@pytest.mark.parametrize("kind", ["question", "multiple_choice", "explained", "event"])
def test_an_empty_answer_is_wrong(kind: str) -> None:
    assert all(facts(sample, "") == 0.0 for sample in samples(kind, 100))
