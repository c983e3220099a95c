"""Sparse-to-Dense drafting (arXiv 2505.19155): the verifier's own weights over a sparse view of its KV.

    verifier's pool, read-only    context slab                      thread slab
                                  text rows, selected visual rows   prompt rows, rows of committed answer tokens
                                     | gathered once, at open          | copied once each, exact
    scratch, owned here           [ sparse context                  | thread: exact ... | own rows of this round,
    approximate ]

The gathered keys carry their RoPE already, so a row may lie anywhere; new tokens use their own positions. The scratch
is freed by dropping the sequence, in the device thread, after the step that is running.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from drafter_svc.drafts import Draft, Round, SequenceSpec
from engine.attention import KvView
from engine.kv_share import KvStale, MappedPool
from engine.positions import text_positions
from engine.runner import TextRunner
from engine.sampling import choose


class SparseSequence:
    """One sequence's sparse view and its drafts. Only the device thread touches it."""

    def __init__(self, runner: TextRunner, pool: MappedPool, spec: SequenceSpec) -> None:
        """Gathers the sparse context and the prompt's thread rows.

        Raises KvStale when the pool does not hold what `spec` says, ValueError when a slab does not lie in it.
        """
        self._runner, self._pool, self._spec = runner, pool, spec
        self._thread = pool.views(spec.thread)
        context = pool.views(spec.context)
        rows = _visible_rows(spec, pool.selection_view(spec.selection))
        self.num_sparse_tokens = rows.shape[2]
        # Sequence index of a thread token + shift = its row in the scratch.
        self._shift = self.num_sparse_tokens - spec.num_context_tokens
        keys, values = context
        shape = (*keys.shape[:2], self.num_sparse_tokens + spec.thread.capacity, keys.shape[3])
        self._scratch = keys.new_zeros(shape), values.new_zeros(shape)
        for source, target in zip(context, self._scratch, strict=True):
            _gather(source, rows, target)
        self._clean_len = spec.num_context_tokens  # tokens whose rows here are the verifier's
        self._take_committed(spec.num_prompt_tokens)

    def draft(self, asked: Round, *, is_cancelled: Callable[[], bool]) -> Draft:
        """Proposes tokens after a round's; fewer when the sequence ends or the caller goes away. Raises KvStale."""
        begin = time.perf_counter_ns()
        self._take_committed(asked.base_len)
        kv = KvView(None, self._scratch, asked.base_len + self._shift)
        index, fed, drafts = asked.base_len, list(asked.token_ids), list[int]()
        num_wanted = min(asked.num_draft_tokens, self._spec.max_len - index - len(fed))
        while len(drafts) < num_wanted and not is_cancelled():
            positions = text_positions(index + self._spec.position_delta, len(fed))
            hidden = self._runner.step(token_ids=fed, positions=positions, kv=kv)
            kv.thread_len += len(fed)
            index += len(fed)
            fed = choose(self._runner.logits(hidden[-1:]), index, self._spec.sampling)
            drafts += fed
        model_us = (time.perf_counter_ns() - begin) // 1000
        return Draft(asked.round, asked.base_len, tuple(drafts), model_us)

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


def _visible_rows(spec: SequenceSpec, selection: Tensor) -> Tensor:
    """Returns the context rows to read, int64 [num_layers, num_kv_heads, num_sparse]: text, then selected."""
    is_text = torch.ones(spec.num_context_tokens, dtype=torch.bool)
    for start, num_tokens in spec.visual_spans:
        is_text[start : start + num_tokens] = False
    text = is_text.nonzero()[:, 0].to(selection.device)
    if selection.numel() and (int(selection.min()) < 0 or int(selection.max()) >= spec.num_context_tokens):
        raise KvStale("the selection names rows outside the context")
    return torch.cat([text.expand(*selection.shape[:2], -1), selection.long()], dim=2)


def _gather(source: Tensor, rows: Tensor, target: Tensor) -> None:
    """Copies the named rows of each layer and head, [layers, kv_heads, rows, head_dim], to the front of `target`."""
    num_rows = rows.shape[2]
    for layer in range(source.shape[0]):
        for head in range(source.shape[1]):
            torch.index_select(source[layer, head], 0, rows[layer, head], out=target[layer, head, :num_rows])
