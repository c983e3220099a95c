"""Text without a video that teaches finding a word among options, and comparing a word with one told before.

Multiple choice and yes/no rest on these two, and from videos alone they are not learned: an answer's one letter says
too little about which of the steps before it was wrong. Here a sequence asks often, and what is to be found stands in
the text.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.world.facts import FACT_WORDS, WORDS_BY_FACT
from bench.world.model import TOKEN_ID
from bench.world.questions import (
    CHOOSABLE,
    LETTERS,
    ask_caption,
    ask_describe,
    ask_explained,
    ask_multiple_choice,
    ask_yes_no,
    listed_options,
)
from bench.world.scenes import Plan, sample_world
from bench.world.splits import TRAIN
from bench.world.train.branches import IGNORED
from bench.world.train.guidance import Link, Links, link_table

START = "<|im_start|>user\n<|vision_start|><|vision_end|>"
TO_ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"
TO_USER = "<|im_end|>\n<|im_start|>user\n"
NUM_RECALLED = 8

Piece = tuple[str, bool]  # text, and whether its tokens are learned


def recall(rng: random.Random) -> list[Piece]:
    """Options, then their words again in any order, each before its letter."""
    kind = rng.choice(CHOOSABLE)
    pool = sorted(FACT_WORDS) if rng.random() < 0.5 else WORDS_BY_FACT[kind]
    words = rng.sample(pool, len(LETTERS))
    pieces = [(f"Options: {listed_options(words)}." + TO_ASSISTANT, False)]
    for word in rng.choices(words, k=NUM_RECALLED):
        pieces += [(f" {word}", False), (f" {LETTERS[words.index(word)]}", True)]
    return pieces


def concluded(rng: random.Random) -> list[Piece]:
    """A choice or a yes/no whose explanation is given: what follows from it is learned."""
    sample = ask_explained(rng, sample_world(rng.randrange(TRAIN.start, TRAIN.stop), Plan(8, max_things=6)))
    explanation, so, conclusion = sample.answer.rpartition("So")
    return [(sample.question + TO_ASSISTANT + explanation + so, False), (conclusion, True)]


def told(rng: random.Random) -> list[Piece]:
    """A video told in words, then choices and yes/no about it."""
    world = sample_world(rng.randrange(TRAIN.start, TRAIN.stop), Plan(8, max_things=2))
    first = rng.choice((ask_caption, ask_describe))(rng, world)
    pieces = [(first.question + TO_ASSISTANT + first.answer, False)]
    asked = {fact.color for fact in first.key}
    while len(pieces) < 8:
        sample = rng.choice((ask_multiple_choice, ask_yes_no))(rng, world)
        if sample.key[0].color in asked:
            pieces += [(TO_USER + sample.question + TO_ASSISTANT, False), (sample.answer, True)]
    return pieces


DRILLS: dict[str, Callable[[random.Random], list[Piece]]] = {"recall": recall, "concluded": concluded, "told": told}


@dataclass(frozen=True)
class DrillBatch:
    """Each sequence starts at column 0; what is behind its end is not learned."""

    input_ids: Tensor  # [num_sequences, L]
    targets: Tensor  # [num_sequences, L], IGNORED except where the next token is learned
    links: Tensor  # [num_links, 4], as `Guide.loss` takes them


def drill_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, links: Links, kind: str, *, num_tokens: int
) -> DrillBatch:
    """Sequences of one kind, about num_tokens in all."""
    rows: list[tuple[list[int], list[int]]] = []
    found: list[list[Link]] = []
    total = 0
    while total < num_tokens:
        token_ids: list[int] = tokenizer(START)["input_ids"]
        learned = [False] * len(token_ids)
        for text, is_learned in DRILLS[kind](rng):
            piece: list[int] = tokenizer(text)["input_ids"]
            token_ids += piece
            learned += [is_learned] * len(piece)
        found.append(links.find(token_ids, learned))
        wanted = [token_id if known else IGNORED for token_id, known in zip(token_ids, learned, strict=True)]
        rows.append((token_ids, wanted))
        total += len(token_ids)
    length = max(len(token_ids) for token_ids, _ in rows)
    input_ids = torch.full((len(rows), length), TOKEN_ID["<|endoftext|>"])
    targets = torch.full((len(rows), length), IGNORED)
    for index, (token_ids, wanted) in enumerate(rows):
        input_ids[index, : len(token_ids)] = torch.tensor(token_ids)
        targets[index, : len(token_ids) - 1] = torch.tensor(wanted[1:])
    return DrillBatch(input_ids, targets, link_table(found))
