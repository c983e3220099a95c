"""Drafting with the verifier's own weights: the KV of committed tokens is the verifier's, exact, and only read.

    verifier's pool, read-only    context slab                      thread slab
                                  what the kind reads of it         prompt rows, rows of committed answer tokens
                                     | copied or viewed, at open       | copied once each, exact
    owned here                    [ context part                    | thread: exact ... | own rows of this round,
    approximate ]

Own rows are overwritten as soon as their tokens are committed. The memory is freed by dropping the sequence, in the
device thread, after the step that is running.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from drafter_svc.chain import Chain, adjuster_of
from drafter_svc.drafts import Draft, Round, SequenceSpec
from engine.attention import KvView
from engine.kv_share import KvStale, MappedPool
from engine.runner import TextRunner
from engine.scheduler import Steps

Kv = tuple[Tensor, Tensor]  # keys and values, [num_layers, num_kv_heads, rows, head_dim]


class SharedKvSequence:
    """One sequence over the verifier's KV. A kind says what it reads of the context.

    `context` is attended as it is, and may be a view of the pool; or None when the kind put its rows at the front of
    the scratch. `copied` are those rows, `scratch` has room for them and the thread.
    """

    def __init__(self, runner: TextRunner, pool: MappedPool, spec: SequenceSpec, *, num_layers: int) -> None:
        self._pool, self._spec = pool, spec
        self._chain = Chain(runner, spec.position_delta, spec.sampling, adjuster_of(spec, runner))
        self._answer: tuple[int, ...] = ()  # with the last drafts; empty without an adjuster
        keys, values = pool.views(spec.thread)
        self._thread: Kv = keys[:num_layers], values[:num_layers]
        self._clean_len = spec.num_context_tokens  # tokens whose rows here are the verifier's
        self._context: Kv | None = None
        self._scratch: Kv = self._thread
        self._shift = 0

    @property
    def num_context_rows(self) -> int:
        """How many rows of the context are read."""
        return self._shift + self._spec.num_context_tokens if self._context is None else self._context[0].shape[2]

    def read_copied(self, context: Kv, rows: Tensor) -> None:
        """Copies the named rows of each layer and head, int64 [num_layers, num_kv_heads, n], and the prompt's rows."""
        self._make_scratch(num_copied=rows.shape[2])
        for source, target in zip(context, self._scratch, strict=True):
            _gather(source, rows, target)
        self._take_committed(self._spec.num_prompt_tokens)

    def read_in_place(self, context: Kv) -> None:
        """Attends the pool's own rows, all of them; copies the prompt's rows."""
        self._make_scratch(num_copied=0)
        self._context = context
        self._take_committed(self._spec.num_prompt_tokens)

    def draft(self, asked: Round) -> Steps[Draft]:
        """Proposes tokens after a round's; fewer when the sequence ends. Raises KvStale."""
        begin_s = time.perf_counter()
        self._take_committed(asked.base_len)
        copied_s = time.perf_counter() - begin_s
        answer = self._answer_of(asked)
        proposed = yield from self._chain.propose(
            KvView(self._context, self._scratch, asked.base_len + self._shift),
            token_ids=asked.token_ids,
            base_len=asked.base_len,
            num_wanted=self._spec.num_wanted(asked),
            answer=answer,
        )
        if answer:
            self._answer = (*answer, *proposed.token_ids)
        model_us = int((copied_s + proposed.steps_s) * 1e6)
        return Draft(asked.round, asked.base_len, proposed.token_ids, model_us)

    def _answer_of(self, asked: Round) -> tuple[int, ...]:
        """Returns the answer up to a round, where its tokens are counted: what was kept of earlier rounds goes on."""
        if self._chain.adjuster is None:
            return ()
        return (*self._answer[: asked.base_len - self._spec.num_prompt_tokens], *asked.token_ids)

    def _make_scratch(self, *, num_copied: int) -> None:
        keys, values = self._thread
        shape = (*keys.shape[:2], num_copied + self._spec.thread.capacity, keys.shape[3])
        self._scratch = keys.new_zeros(shape), values.new_zeros(shape)
        # Sequence index of a thread token + shift = its row in the scratch.
        self._shift = num_copied - self._spec.num_context_tokens

    def _take_committed(self, base_len: int) -> None:
        """Copies the verifier's rows of the tokens committed since, over own approximate ones."""
        start, stop = self._clean_len, base_len
        if start < stop:
            offset = self._spec.num_context_tokens
            for source, target in zip(self._thread, self._scratch, strict=True):
                target[:, :, start + self._shift : stop + self._shift] = source[:, :, start - offset : stop - offset]
            self._clean_len = base_len
        # After reading: an owner that is alive now was alive while its rows were read.
        self._pool.check()


def text_rows(spec: SequenceSpec) -> list[int]:
    """Returns the context's rows that hold no visual token, ascending."""
    rows, stop = list[int](), 0
    for start, num_tokens in spec.visual_spans:  # ascending, and far fewer than there are rows
        rows += range(stop, start)
        stop = start + num_tokens
    return [*rows, *range(stop, spec.num_context_tokens)]


def checked_selection(spec: SequenceSpec, pool: MappedPool) -> Tensor:
    """Returns the verifier's selection, int64 [num_layers, num_kv_heads, n]. Raises KvStale when it cannot be one."""
    if spec.selection is None:
        raise KvStale("the verifier made no selection")
    selection = pool.selection_view(spec.selection)
    if selection.numel() and (int(selection.min()) < 0 or int(selection.max()) >= spec.num_context_tokens):
        raise KvStale("the selection names rows outside the context")
    return selection.long()


def _gather(source: Tensor, rows: Tensor, target: Tensor) -> None:
    """Copies the named rows of each layer and head, [layers, kv_heads, rows, head_dim], to the front of `target`."""
    num_rows = rows.shape[2]
    for layer in range(source.shape[0]):
        for head in range(source.shape[1]):
            torch.index_select(source[layer, head], 0, rows[layer, head], out=target[layer, head, :num_rows])
