"""Does this machine's arithmetic have the property that deterministic mode is built on? Asked once, at start."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention import KvView
from engine.loading import LoadedModel
from engine.runner import TextRunner

_CONTEXT_LEN = 130
_NUM_TOKENS = 17
_BLOCKS = (2, 4, 5, 7, 17)


def bit_stable(loaded: LoadedModel) -> bool:
    """Tells whether the model's logits have the same bits one by one and in blocks, on random keys and tokens.

    Matrix libraries promise nothing of the kind; they keep it for a kernel and a shape, so the model's own shapes are
    tried.
    """
    runner = TextRunner(loaded, deterministic=True)
    generator = torch.Generator().manual_seed(0)
    layout = loaded.layout
    shape = (layout.num_layers, layout.num_kv_heads, _CONTEXT_LEN, layout.head_dim)
    context = (
        torch.randn(shape, generator=generator).to(layout.dtype),
        torch.randn(shape, generator=generator).to(layout.dtype),
    )
    token_ids = torch.randint(loaded.tokenizer.get_vocab_size(), (_NUM_TOKENS,), generator=generator).tolist()
    expected = _logits(runner, context, token_ids, block=1)
    return all(torch.equal(_logits(runner, context, token_ids, block=block), expected) for block in _BLOCKS)


def _logits(runner: TextRunner, context: tuple[Tensor, Tensor], token_ids: list[int], *, block: int) -> Tensor:
    keys = context[0]
    empty = keys.new_zeros(*keys.shape[:2], len(token_ids), keys.shape[3])
    kv = KvView(context, (empty, empty.clone()), 0)
    rows = []
    for start in range(0, len(token_ids), block):
        part = token_ids[start : start + block]
        hidden = runner.step(token_ids=part, position=_CONTEXT_LEN + start, kv=kv)
        rows.append(runner.logits(hidden))
        kv.thread_len += len(part)
    return torch.cat(rows)
