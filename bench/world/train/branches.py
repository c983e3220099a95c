"""Training rows: one visual prefix, then independent conversations about it, each seeing only the prefix and itself."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.world.facts import CELLS, FACT_WORDS
from bench.world.model import TOKEN_ID
from bench.world.positions import TOKENS_PER_SECOND, Grid, video_positions
from bench.world.processor import SYSTEM_PROMPT
from bench.world.sample import Sample

IGNORED = -100
PADDING_BRANCH = -1
PREFIX_BRANCH = 0


@dataclass(frozen=True)
class Branch:
    token_ids: list[int]
    is_answer: list[bool]


@dataclass(frozen=True)
class Rows:
    """A batch; L is the longest row."""

    input_ids: Tensor  # [num_rows, L]
    positions: Tensor  # [3, num_rows, L]
    mask: Tensor  # [num_rows, 1, L, L], True where a token may look
    targets: Tensor  # [num_rows, L], IGNORED except where the next token is an answer's


class BranchPacker:
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        def encode(text: str) -> list[int]:
            token_ids: list[int] = tokenizer(text)["input_ids"]
            return token_ids

        self._encode = encode
        self._encode_question = lru_cache(maxsize=100_000)(lambda text: tuple(encode(text)))
        self._prefix = encode(
            f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n<|vision_start|>",
        )
        self._to_assistant = encode("<|im_end|>\n<|im_start|>assistant\n")
        self._to_user = encode("\n<|im_start|>user\n")

    def branch(self, turns: Sequence[Sample]) -> Branch:
        token_ids: list[int] = []
        is_answer: list[bool] = []
        for index, turn in enumerate(turns):
            between = self._to_user if index else []
            asked = [*between, *self._encode_question(turn.question), *self._to_assistant]
            answered = [*self._encode(turn.answer), TOKEN_ID["<|im_end|>"]]
            token_ids += asked + answered
            is_answer += [False] * len(asked) + [True] * len(answered)
        return Branch(token_ids, is_answer)

    def rows(self, branches_by_row: Sequence[Sequence[Branch]], *, num_pairs: int, interval: int) -> Rows:
        """All rows have videos of the same length; interval: temporal positions between frame pairs."""
        packed = [self._row(branches, num_pairs, interval) for branches in branches_by_row]
        length = max(row.shape[1] for row in packed)
        batch = torch.zeros(len(packed), 6, length, dtype=torch.long)  # token, 3 positions, target, branch
        batch[:, 4], batch[:, 5] = IGNORED, PADDING_BRANCH
        for index, row in enumerate(packed):
            batch[index, :, : row.shape[1]] = row
        branch = batch[:, 5]
        mask = (branch[:, :, None] == branch[:, None, :]) | (branch == PREFIX_BRANCH)[:, None, :]
        mask &= torch.ones(length, length, dtype=torch.bool).tril()
        return Rows(batch[:, 0], batch[:, 1:4].transpose(0, 1), mask[:, None], batch[:, 4])

    def hide(self, rows: Rows, row: int, hidden: Tensor) -> None:
        """Keep a row's text from looking at visual tokens: hidden [num_visual_tokens], bool; changes `rows.mask`."""
        first, end = len(self._prefix), len(self._prefix) + len(hidden)
        rows.mask[row, 0, end:, first:end] &= ~hidden

    def _row(self, branches: Sequence[Branch], num_pairs: int, interval: int) -> Tensor:
        prefix, visual = len(self._prefix), num_pairs * CELLS
        seconds = interval / TOKENS_PER_SECOND
        video = video_positions(prefix, Grid(num_pairs, 6, 6, seconds))
        text_start = int(video.max()) + 1
        row = torch.full((6, prefix + visual + 1 + sum(len(b.token_ids) for b in branches)), IGNORED)
        row[5] = PREFIX_BRANCH
        row[0, :prefix] = torch.tensor(self._prefix)
        row[1:4, :prefix] = torch.arange(prefix)
        row[0, prefix : prefix + visual] = TOKEN_ID["<|video_pad|>"]
        row[1:4, prefix : prefix + visual] = video
        row[0, prefix + visual] = TOKEN_ID["<|vision_end|>"]
        row[1:4, prefix + visual] = text_start
        at = prefix + visual + 1
        for number, branch in enumerate(branches, start=1):
            end = at + len(branch.token_ids)
            ids = torch.tensor(branch.token_ids)
            answer_at = torch.tensor(branch.is_answer).nonzero()[:, 0]
            row[0, at:end] = ids
            row[1:4, at:end] = text_start + 1 + torch.arange(len(ids))
            row[4, at + answer_at - 1] = ids[answer_at]
            row[5, at:end] = number
            at = end
        return row


def fact_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that are a fact word, or an option's letter or a yes or no."""
    words = [*FACT_WORDS, "A", "B", "C", "D", "Yes", "No"]
    encoded = [tokenizer(form)["input_ids"] for word in words for form in (word, f" {word}")]
    return sorted({ids[0] for ids in encoded if len(ids) == 1})


def conversations(rng: random.Random, samples: list[Sample], *, share_single: float = 0.75) -> list[list[Sample]]:
    """Group questions into conversations of one to three turns."""
    out: list[list[Sample]] = []
    left = list(samples)
    while left:
        num_turns = 1 if rng.random() < share_single else rng.choice((2, 3))
        out.append(left[:num_turns])
        left = left[num_turns:]
    return out
