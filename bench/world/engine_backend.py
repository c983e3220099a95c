"""Greedy decoding with the engine's runner and kernels, without its services."""

import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.attention import KvView, QueryTap
from engine.loading import LoadedModel
from engine.native.build import user_cache
from engine.runner import TextRunner


class EngineBackend:
    """Keys and values of one prefix in plain memory."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.runner = loaded, TextRunner(loaded, kernel_cache=user_cache(os.environ))
        self.context = self.new_kv(0)

    def new_kv(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Keys and values [num_layers, num_kv_heads, capacity, head_dim]."""
        layout = self.loaded.layout
        shape = (layout.num_layers, layout.num_kv_heads, capacity, layout.head_dim)
        return torch.zeros(shape, dtype=layout.dtype), torch.zeros(shape, dtype=layout.dtype)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        return self.runner.embed(token_ids)

    def prefill(self, chunks: Iterable[tuple[Tensor, Tensor]], num_tokens: int) -> None:
        self.context = self.new_kv(num_tokens)
        view = KvView(None, self.context, 0)
        for embeds, positions in chunks:
            self.runner.forward(embeds=embeds, positions=positions, kv=view)
            view.thread_len += len(embeds)

    def greedy(self, token_ids: Sequence[int], positions: Tensor, *, end_id: int, max_new_tokens: int) -> list[int]:
        view = KvView(self.context, self.new_kv(len(token_ids) + max_new_tokens), 0)
        chosen = self.open(view, token_ids, positions)
        position, out = int(positions.max()) + 1, list[int]()
        while chosen != end_id and len(out) < max_new_tokens:
            out.append(chosen)
            hidden = self.runner.step(token_ids=[chosen], position=position, kv=view)
            view.thread_len += 1
            position += 1
            chosen = int(self.runner.logits(hidden)[-1].argmax())
        return out

    def open(
        self, view: KvView, token_ids: Sequence[int], positions: Tensor, *, query_tap: QueryTap | None = None
    ) -> int:
        """Runs a question after the prefix; returns the most likely first token."""
        hidden = self.runner.forward(token_ids=token_ids, positions=positions, kv=view, query_tap=query_tap)
        view.thread_len += len(token_ids)
        return int(self.runner.logits(hidden[-1:])[0].argmax())
