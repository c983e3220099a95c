"""Training rows: one visual prefix, then independent conversations about it, each seeing only the prefix and itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.world.draw import visible_cells
from bench.world.facts import BACKGROUNDS, COLORS, FACT_WORDS
from bench.world.families import WorldFamily
from bench.world.model import TOKEN_ID
from bench.world.questions import unsaid_word
from bench.world.sample import Sample
from bench.world.scenes import Thing, World
from bench.world.train.guidance import Link, Links, link_table

IGNORED = -100
PADDING_BRANCH = -1
PREFIX_BRANCH = 0


@dataclass(frozen=True)
class Branch:
    world: World
    token_ids: list[int]
    is_answer: list[bool]
    links: list[Link]
    names: list[tuple[int, int]]  # where an answer rests on a fact that it does not say, and that fact's token
    looks: list[tuple[int, Thing]]  # where a background is said next, and the thing it is of


@dataclass(frozen=True)
class Rows:
    """A batch; L is the longest row."""

    input_ids: Tensor  # [num_rows, L]
    positions: Tensor  # [3, num_rows, L]
    mask: Tensor  # [num_rows, 1, L, L], True where a token may look
    targets: Tensor  # [num_rows, L], IGNORED except where the next token is an answer's
    links: Tensor  # [num_links, 4], as `Guide.loss` takes them
    names: Tensor  # [num_names, 3], as `Guide.naming` takes them
    looks: Tensor  # [num_looks, 2], as `Guide.looking` takes them
    shown: Tensor  # [num_looks, L], likewise

    def to(self, device: str) -> "Rows":
        return Rows(*(getattr(self, field.name).to(device) for field in fields(self)))


class BranchPacker:
    def __init__(self, tokenizer: PreTrainedTokenizerFast, family: WorldFamily) -> None:
        def encode(text: str) -> list[int]:
            token_ids: list[int] = tokenizer(text)["input_ids"]
            return token_ids

        self._encode = encode
        self._encode_question = lru_cache(maxsize=100_000)(lambda text: tuple(encode(text)))
        self._family = family
        self._links = Links(tokenizer)
        self._colors = _token_ids(tokenizer, COLORS)
        self._backgrounds = _token_ids(tokenizer, BACKGROUNDS)
        self._prefix = encode(family.chat.before_video)
        self._after_video = encode(family.chat.after_video)
        self._to_assistant = encode(family.chat.to_assistant)
        self._to_user = encode(family.chat.to_user)

    def branch(self, turns: Sequence[Sample]) -> Branch:
        token_ids: list[int] = []
        is_answer: list[bool] = []
        names: list[tuple[int, int]] = []
        looks: list[tuple[int, Thing]] = []
        for index, turn in enumerate(turns):
            before = self._family.chat.before_later_question if index else ""
            asked = [*self._encode_question(before + turn.question), *self._to_assistant]
            if index:
                asked = self._to_user + asked
            answered = [*self._encode(turn.answer), TOKEN_ID["<|im_end|>"]]
            if word := unsaid_word(turn):
                names.append((len(token_ids) + len(asked) - 1, self._encode_question(f" {word}")[0]))
            at = len(token_ids) + len(asked) - 1
            looks += [(at + place, thing) for place, thing in self._backgrounds_said(turn, answered)]
            token_ids += asked + answered
            is_answer += [False] * len(asked) + [True] * len(answered)
        return Branch(turns[0].world, token_ids, is_answer, self._links.find(token_ids, is_answer), names, looks)

    def _backgrounds_said(self, turn: Sample, answered: Sequence[int]) -> Iterator[tuple[int, Thing]]:
        """Places of an answer's tokens that are backgrounds, with the thing named last before."""
        things = {thing.color: thing for thing in turn.world.things}
        color = turn.key[0].color
        for place, token_id in enumerate(answered):
            color = self._colors.get(token_id, color)
            if token_id in self._backgrounds and color in things:
                yield place, things[color]

    def rows(self, branches_by_row: Sequence[Sequence[Branch]], *, num_pairs: int, interval: float) -> Rows:
        """All rows have videos of the same length; interval: temporal positions between frame pairs."""
        video = self._family.video_positions(len(self._prefix), num_pairs, interval)
        packed = [self._row(branches, video) for branches in branches_by_row]
        length = max(row.shape[1] for row in packed)
        batch = torch.zeros(len(packed), 6, length, dtype=torch.long)  # token, 3 positions, target, branch
        batch[:, 4], batch[:, 5] = IGNORED, PADDING_BRANCH
        for index, row in enumerate(packed):
            batch[index, :, : row.shape[1]] = row
        branch = batch[:, 5]
        mask = (branch[:, :, None] == branch[:, None, :]) | (branch == PREFIX_BRANCH)[:, None, :]
        mask &= torch.ones(length, length, dtype=torch.bool).tril()
        start = len(self._prefix) + video.shape[1] + len(self._after_video)
        links = link_table(self._row_links(branches, start) for branches in branches_by_row)
        names = torch.tensor(self._row_names(branches_by_row, start), dtype=torch.long).reshape(-1, 3)
        looks, shown = self._row_looks(branches_by_row, start, length)
        return Rows(batch[:, 0], batch[:, 1:4].transpose(0, 1), mask[:, None], batch[:, 4], links, names, looks, shown)

    def hide(self, rows: Rows, row: int, hidden: Tensor) -> None:
        """Keep a row's text from looking at cells: hidden [num_cells], bool; changes `rows.mask`."""
        first, end = len(self._prefix), len(self._prefix) + len(hidden)
        rows.mask[row, 0, end:, first:end] &= ~hidden

    def _row_names(self, branches_by_row: Sequence[Sequence[Branch]], start: int) -> list[tuple[int, int, int]]:
        names: list[tuple[int, int, int]] = []
        for row, branches in enumerate(branches_by_row):
            at = start
            for branch in branches:
                names += [(row, at + index, token_id) for index, token_id in branch.names]
                at += len(branch.token_ids)
        return names

    def _row_looks(self, branches_by_row: Sequence[Sequence[Branch]], start: int, length: int) -> tuple[Tensor, Tensor]:
        first = len(self._prefix)
        looks: list[tuple[int, int]] = []
        shown: list[Tensor] = []
        for row, branches in enumerate(branches_by_row):
            at = start
            for branch in branches:
                for index, thing in branch.looks:
                    cells = torch.from_numpy(visible_cells(branch.world, thing)).flatten()
                    looks.append((row, at + index))
                    shown.append(F.pad(cells, (first, length - first - len(cells))))
                at += len(branch.token_ids)
        if not looks:
            return torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, length, dtype=torch.bool)
        return torch.tensor(looks), torch.stack(shown)

    def _row_links(self, branches: Sequence[Branch], start: int) -> list[Link]:
        links: list[Link] = []
        for branch in branches:
            links += [Link(link.kind, start + link.query, start + link.key) for link in branch.links]
            start += len(branch.token_ids)
        return links

    def _row(self, branches: Sequence[Branch], video: Tensor) -> Tensor:
        prefix, visual, after = len(self._prefix), video.shape[1], len(self._after_video)
        after_start = int(video.max()) + 1
        at = prefix + visual + after
        row = torch.full((6, at + sum(len(b.token_ids) for b in branches)), IGNORED)
        row[5] = PREFIX_BRANCH
        row[0, :prefix] = torch.tensor(self._prefix)
        row[1:4, :prefix] = torch.arange(prefix)
        row[0, prefix : prefix + visual] = TOKEN_ID["<|video_pad|>"]
        row[1:4, prefix : prefix + visual] = video
        row[0, prefix + visual : at] = torch.tensor(self._after_video)
        row[1:4, prefix + visual : at] = after_start + torch.arange(after)
        for number, branch in enumerate(branches, start=1):
            end = at + len(branch.token_ids)
            ids = torch.tensor(branch.token_ids)
            answer_at = torch.tensor(branch.is_answer).nonzero()[:, 0]
            row[0, at:end] = ids
            row[1:4, at:end] = after_start + after + torch.arange(len(ids))
            row[4, at + answer_at - 1] = ids[answer_at]
            row[5, at:end] = number
            at = end
        return row


def _token_ids(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> dict[int, str]:
    """The words by their tokens, with or without a space before them."""
    encoded = {form: tokenizer(form)["input_ids"] for word in words for form in (word, f" {word}")}
    return {ids[0]: form.strip() for form, ids in encoded.items() if len(ids) == 1}


def fact_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that are a fact word, or an option's letter or a yes or no."""
    words = [*FACT_WORDS, "A", "B", "C", "D", "Yes", "No", "yes", "no"]
    encoded = [tokenizer(form)["input_ids"] for word in words for form in (word, f" {word}")]
    return sorted({ids[0] for ids in encoded if len(ids) == 1})
