"""What a request does to the logits before temperature: bias, a least length, penalties.

In the field's order, each step on what the one before it left, float32:

    logit_bias           added to the logits of the tokens it names
    min_tokens           tokens that end the answer are impossible before it has so many
    repetition_penalty   of tokens in the prompt or the answer: positive logits are divided by it, others multiplied
    frequency_penalty    subtracted once for every time a token occurs in the answer
    presence_penalty     subtracted from tokens that occur in the answer

A row of logits is adjusted for the tokens before its own place, a round's draft tokens among them. So the verifier's
choice at a place is that of plain decoding wherever the draft before it is accepted, and the drafter, which adjusts its
own logits likewise, proposes what the verifier will choose. Only the columns of tokens that matter are touched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adjustments:
    """What is asked for; see `foveate.v1.SamplingParams`. Bias is (token id, bias), each token once."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0


class Adjuster:
    """Adjusts the logits of one answer. Knows the prompt, and is told the answer so far: it holds no state."""

    def __init__(
        self, asked: Adjustments, *, prompt_token_ids: Collection[int], eos_token_ids: Collection[int]
    ) -> None:
        """`prompt_token_ids` are looked at only with a repetition penalty, their order and number are not."""
        self._asked = asked
        self._prompt = frozenset(prompt_token_ids) if asked.repetition_penalty != 1.0 else frozenset()
        self._eos = sorted(eos_token_ids)
        self._bias = dict(asked.logit_bias)
        self._counts_answer = (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) != (1, 0, 0)

    def adjusted(self, logits: Tensor, answer: Sequence[int], drafts: Sequence[int] = ()) -> Tensor:
        """Returns adjusted `logits` [num_rows, vocab], themselves unchanged.

        Row 0 is for the place after the tokens of `answer`, row i for the place i tokens of `drafts` later.
        """
        num_rows, result = logits.shape[0], logits.clone()
        counted = (answer, drafts[: num_rows - 1]) if self._counts_answer else ((), ())
        token_ids = sorted({*self._bias, *self._prompt, *counted[0], *counted[1]})
        if token_ids:
            columns = torch.tensor(token_ids, device=logits.device)
            result[:, columns] = self._columns(logits[:, columns], token_ids, *counted)
        result[: max(0, self._asked.min_tokens - len(answer)), self._eos] = float("-inf")
        return result

    def _columns(self, some: Tensor, token_ids: list[int], answer: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """Returns the adjusted logits of `token_ids`, [num_rows, num_ids]."""
        asked = self._asked
        if self._bias:
            some = some + some.new_tensor([self._bias.get(token_id, 0.0) for token_id in token_ids])
        if not self._counts_answer:
            return some
        counts = some.new_tensor(_counts(token_ids, answer, drafts))  # small whole numbers, exact in float32
        if asked.repetition_penalty != 1.0:
            in_prompt = torch.tensor([token_id in self._prompt for token_id in token_ids], device=some.device)
            penalized = torch.where(some < 0, some * asked.repetition_penalty, some / asked.repetition_penalty)
            some = torch.where((counts > 0) | in_prompt, penalized, some)
        some = some - asked.frequency_penalty * counts
        return some - asked.presence_penalty * (counts > 0)


def _counts(token_ids: list[int], answer: Sequence[int], drafts: Sequence[int]) -> list[list[int]]:
    """Returns how often each token occurs before each row's place, [num_drafts + 1][num_ids]."""
    column = {token_id: place for place, token_id in enumerate(token_ids)}
    rows = [[0] * len(token_ids)]
    for token_id in answer:
        rows[0][column[token_id]] += 1
    for token_id in drafts:
        rows.append(rows[-1].copy())
        rows[-1][column[token_id]] += 1
    return rows
