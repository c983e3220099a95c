"""What benches of decoding share: a stack that takes long videos, their sizes, questions about them, and counting."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from bench.world import Sample
from bench.world.questions import ask_caption, ask_describe
from foveate.client import Answer, FinishReason
from foveate.stack import StackConfig

FPS = 4.0
CELLS = 9  # visual tokens of a frame pair in the drawn world


def stack_config(model: Path, **settings: Any) -> StackConfig:
    """Returns a stack of one thread a service, with room for videos of 140,000 visual tokens."""
    arguments = ("--max-visual-tokens", "140000", "--max-frames", "40000")
    return StackConfig(model=model, num_threads=1, pool_mib=1024, extra_verifier_arguments=arguments, **settings)


def num_frame_pairs(num_visual_tokens: int) -> int:
    """Returns how many frame pairs have at least so many visual tokens."""
    return -(-num_visual_tokens // CELLS)


def questions_about(sample: Sample, num_questions: int) -> list[str]:
    """A caption of the whole video, then descriptions of things in it."""
    described = [ask_describe(random.Random(index), sample.world).question for index in range(num_questions - 1)]
    return [ask_caption(random.Random(0), sample.world).question, *described]


def answer_len(answer: Answer) -> int:
    """Returns the tokens of an answer, the one that ended it included: it is decoded too, though it is no output."""
    return answer.num_output_tokens + (answer.finish_reason is FinishReason.EOS)
