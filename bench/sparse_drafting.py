"""Drafting from a sparse view, without services: how many drafts of a known answer would be accepted?

Greedy and lossless, so the answer is what plain decoding gives, and a round's outcome follows from the drafts alone.
The view is the drafter's: the context's text and the selected visual entries, exact rows of all committed tokens, own
rows of this round's drafts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from operator import and_

import torch
from torch import Tensor

from bench.world.engine_backend import EngineBackend
from engine.attention import KvView, QueryTap


@dataclass(frozen=True)
class Answered:
    """A question with its plain greedy answer, and the exact keys and values of both.

    token_ids: the answer's, its end included. thread: [num_layers, num_kv_heads, num_prompt + num_tokens, head_dim].
    """

    token_ids: list[int]
    thread: tuple[Tensor, Tensor]
    num_prompt: int
    first_position: int  # of the answer's first token


def answer(
    backend: EngineBackend,
    token_ids: list[int],
    positions: Tensor,
    *,
    end_id: int,
    max_new_tokens: int,
    query_tap: QueryTap | None = None,
) -> Answered:
    """Asks after the backend's prefix; the tap sees the queries of the question."""
    view = KvView(backend.context, backend.new_kv(len(token_ids) + max_new_tokens), 0)
    out = [backend.open(view, token_ids, positions, query_tap=query_tap)]
    first = int(positions.max()) + 1
    while out[-1] != end_id and len(out) < max_new_tokens:
        hidden = backend.runner.step(token_ids=out[-1:], position=first + len(out) - 1, kv=view)
        view.thread_len += 1
        out.append(int(backend.runner.logits(hidden)[-1].argmax()))
    return Answered(out, view.thread, len(token_ids), first)


def sparse_context(backend: EngineBackend, text_index: Tensor, selection: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [num_layers, num_kv_heads, num_rows, head_dim] of text rows and selected ones.

    selection [num_layers, num_kv_heads, num_selected]: indices into the context
    """
    rows = torch.cat([text_index.expand(*selection.shape[:2], -1), selection.long()], dim=2)
    keys, values = (whole.gather(2, rows[..., None].expand(*rows.shape, whole.shape[-1])) for whole in backend.context)
    return keys, values


@dataclass(frozen=True)
class Outcome:
    """T is accepted / rounds: without the token that the verifier adds in each round."""

    num_rounds: int
    num_drafted: int
    num_accepted: int

    @property
    def accepted_per_round(self) -> float:
        return self.num_accepted / max(1, self.num_rounds)


def draft(
    backend: EngineBackend, answered: Answered, context: tuple[Tensor, Tensor], *, num_draft_tokens: int
) -> Outcome:
    """Drafts the whole answer but for its first token, which the prompt's forward chose already."""
    scratch = answered.thread[0].clone(), answered.thread[1].clone()
    num_rounds = num_drafted = num_accepted = 0
    committed = 1
    while committed < len(answered.token_ids):
        wanted = answered.token_ids[committed : committed + num_draft_tokens]
        drafts = _one_round(backend, answered, context, scratch, committed, len(wanted))
        accepted = sum(itertools.accumulate((one == other for one, other in zip(drafts, wanted, strict=True)), and_))
        num_rounds += 1
        num_drafted += len(drafts)
        num_accepted += accepted
        committed += accepted + 1
    return Outcome(num_rounds, num_drafted, num_accepted)


def _one_round(
    backend: EngineBackend,
    answered: Answered,
    context: tuple[Tensor, Tensor],
    scratch: tuple[Tensor, Tensor],
    committed: int,
    num_drafts: int,
) -> list[int]:
    num_exact = answered.num_prompt + committed - 1  # the last committed token has no row yet
    for target, source in zip(scratch, answered.thread, strict=True):
        target[:, :, :num_exact] = source[:, :, :num_exact]
    view = KvView(context, scratch, num_exact)
    position = answered.first_position + committed - 1
    fed, drafts = answered.token_ids[committed - 1], list[int]()
    while len(drafts) < num_drafts:
        hidden = backend.runner.step(token_ids=[fed], position=position, kv=view)
        view.thread_len += 1
        position += 1
        fed = int(backend.runner.logits(hidden)[-1].argmax())
        drafts.append(fed)
    return drafts
