"""What a forward attends, and the two verbs of a kernel: plan once per step, run per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

IMPLEMENTATION_NAME = "foveate"


@dataclass
class KvView:
    """What one sequence attends.

    `context`: keys and values [num_layers, num_kv_heads, context_len, head_dim], read-only, every row visible to
    every query; None without one. `thread`: keys and values [num_layers, num_kv_heads, capacity, head_dim]; rows
    before `thread_len` are visible, a forward writes its own after them. Whoever holds the view advances or truncates
    `thread_len`.
    """

    context: tuple[Tensor, Tensor] | None
    thread: tuple[Tensor, Tensor]
    thread_len: int

    @property
    def context_len(self) -> int:
        """Number of rows in the context."""
        return 0 if self.context is None else self.context[0].shape[2]

    @property
    def capacity(self) -> int:
        """Number of rows the thread has room for."""
        return self.thread[0].shape[2]


class QueryTap(Protocol):
    """Sees the queries of each layer, after RoPE."""

    def on_layer(self, layer: int, query: Tensor) -> None:
        """Takes [num_heads, num_rows, head_dim]; called before the layer's attention, in order of layers."""


class AttentionPlan(Protocol):
    """Everything about a step that is the same in all layers."""

    def run(self, layer: int, query: Tensor) -> Tensor:
        """Attends [1, num_heads, num_rows, head_dim] to the rows visible in `layer`, own ones included.

        Returns [1, num_rows, num_heads, head_dim].
        """


class AttentionKernel(Protocol):
    """A way to attend on one kind of device."""

    @property
    def name(self) -> str:
        """Name in server info and metrics."""

    def plan(self, kv: KvView, num_new: int, num_rows: int, *, num_heads: int, scaling: float) -> AttentionPlan:
        """Prepares a step of `num_rows` query rows, of which the first `num_new` are written to the thread.

        Rows beyond `num_new` are padding: they attend as the last new row does.
        """


class Step:
    """One forward's attention: new keys and values go to the thread, queries to the tap, then the plan runs."""

    def __init__(self, kv: KvView, num_new: int, plan: AttentionPlan, tap: QueryTap | None) -> None:
        keys, values = kv.thread
        stop = kv.thread_len + num_new
        self._num_new, self._plan, self._tap = num_new, plan, tap
        self._new_keys = keys[:, :, kv.thread_len : stop].unbind(0)
        self._new_values = values[:, :, kv.thread_len : stop].unbind(0)
        self._device = keys.device

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Runs one layer on [1, heads, num_rows, head_dim] each; returns [1, num_rows, num_heads, head_dim].

        A layer on another device than the keys and values sends its rows to theirs, and gets back what they attended.
        """
        self._new_keys[layer].copy_(key[0, :, : self._num_new])
        self._new_values[layer].copy_(value[0, :, : self._num_new])
        here = query.to(self._device)
        if self._tap is not None:
            self._tap.on_layer(layer, here[0])
        return self._plan.run(layer, here).to(query.device)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, step: Step, **_: Any
) -> tuple[Tensor, None]:
    """The function transformers calls in each layer; `step` is the runner's keyword argument to the model."""
    return step.attend(module.layer_idx, query, key, value), None


AttentionInterface.register(IMPLEMENTATION_NAME, attend)
