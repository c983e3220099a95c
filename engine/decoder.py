"""The layers of a Qwen2 or Qwen3 text model as plain calls: transformers' arithmetic, to the bit, at less cost.

On a CPU a step of a small model spends more time in Python than in arithmetic, and a draft is a chain of such steps.
This reads the weights of the loaded modules in place and keeps no state. It is used for float32 on CPUs; elsewhere
transformers' own forward runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import Step
from engine.relevance import LayerTap


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer, [out, in]."""

    input_norm: Tensor
    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]
    value: tuple[Tensor, Tensor | None]
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, module: Any) -> _Layer:
        attention, mlp = module.self_attn, module.mlp

        def linear(projection: Any) -> tuple[Tensor, Tensor | None]:
            return projection.weight, projection.bias

        return cls(
            input_norm=module.input_layernorm.weight,
            query=linear(attention.q_proj),
            key=linear(attention.k_proj),
            value=linear(attention.v_proj),
            query_norm=head_norm(attention, "q_norm"),
            key_norm=head_norm(attention, "k_norm"),
            output=attention.o_proj.weight,
            mlp_norm=module.post_attention_layernorm.weight,
            gate=mlp.gate_proj.weight,
            up=mlp.up_proj.weight,
            down=mlp.down_proj.weight,
        )


class Decoder:
    """A text model from embeddings to the final norm; `axes` [head_dim / 2] is a family's axis of each frequency."""

    def __init__(self, text_model: Any, axes: Tensor) -> None:
        config = text_model.config
        self._layers = [_Layer.of(module) for module in text_model.layers]
        self._final_norm = text_model.norm.weight
        self._eps = float(config.rms_norm_eps)
        self._head_dim = text_model.layers[0].self_attn.head_dim
        self._inverse_frequencies = text_model.rotary_emb.inv_freq.float()  # [head_dim / 2]
        self._rope_scaling = float(text_model.rotary_emb.attention_scaling)
        self._axes = axes

    @staticmethod
    def supports(text_model: Any, device: torch.device) -> bool:
        """Tells whether this text model of a family with plain layers, here, is reproduced to the bit."""
        config = text_model.config
        return (
            device.type == "cpu"
            and text_model.norm.weight.dtype is torch.float32
            and config.hidden_act == "silu"
            and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
            and config.rope_parameters["rope_type"] == "default"
        )

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        step: Step,
        layer_tap: LayerTap | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """Returns hidden states after the final norm, [num_rows, hidden].

        `positions` is [3, num_rows]; `added` [num_added, num_rows, hidden] goes to what the first layers give.
        """
        cos, sin = self._rotation(positions)
        hidden, width = embeds, embeds.shape[-1:]
        for index, layer in enumerate(self._layers):
            if layer_tap is not None and layer_tap.layer == index:
                layer_tap.take(hidden)
            normed = F.rms_norm(hidden, width, layer.input_norm, self._eps)
            query, key, value = (
                F.linear(normed, weight, bias).view(normed.shape[0], -1, self._head_dim)
                for weight, bias in (layer.query, layer.key, layer.value)
            )
            query, key = self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)
            attended = step.attend(
                index, _heads(_rotate(query, cos, sin)), _heads(_rotate(key, cos, sin)), _heads(value)
            )
            hidden = hidden + F.linear(attended.reshape(hidden.shape[0], -1), layer.output)
            normed = F.rms_norm(hidden, width, layer.mlp_norm, self._eps)
            gated = F.silu(F.linear(normed, layer.gate)) * F.linear(normed, layer.up)
            hidden = hidden + F.linear(gated, layer.down)
            if added is not None and index < added.shape[0]:
                hidden = hidden + added[index]
        return F.rms_norm(hidden, width, self._final_norm, self._eps)

    def half_rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [num_rows, head_dim / 2]: each frequency follows one axis."""
        half = positions[self._axes].T.float() * self._inverse_frequencies
        return half.cos() * self._rope_scaling, half.sin() * self._rope_scaling

    def _normed(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        return heads if weight is None else F.rms_norm(heads, heads.shape[-1:], weight, self._eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, [num_rows, 1, head_dim]."""
        cos, sin = self.half_rotation(positions)
        return torch.cat([cos, cos], dim=-1).unsqueeze(1), torch.cat([-sin, sin], dim=-1).unsqueeze(1)


def head_norm(attention: Any, name: str) -> Tensor | None:
    """The weight of a norm over each head's query or key, [head_dim]; None in a family without."""
    norm = getattr(attention, name, None)
    weight: Tensor | None = None if norm is None else norm.weight
    return weight


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat([second, first], dim=-1) * sin


def _heads(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).unsqueeze(0)
