"""The compiled step: a text model's layers in one call, for the few rows of a draft, a verification or a plain step."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from engine.attention import KvView
from engine.layout import KvLayout
from engine.native import build

MAX_ROWS = 64
_LANES = 8
_VALUE_CHUNK = 32


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("qkv_bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("num_layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scaling", ctypes.c_float),
        ("layers", ctypes.POINTER(_Layer)),
        ("final_norm", ctypes.c_void_p),
    )


class _Slab(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("layer_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("len", ctypes.c_int32),
    )


class NativeDecoder:
    """Runs steps of at most MAX_ROWS rows. A row's bits do not depend on the rows it is computed with."""

    name = "cpu-native"

    def __init__(self, library: ctypes.CDLL, text_model: Any, lm_head: Any, layout: KvLayout) -> None:
        config = text_model.config
        self._decode = library.foveate_decode
        self._decode.restype = None
        self._linear = library.foveate_linear
        self._linear.restype = None
        self._kept: list[Tensor] = []  # owns the memory behind the pointers
        layers = [self._layer(module) for module in text_model.layers]
        self._layers = (_Layer * len(layers))(*layers)
        self._model = _Model(
            num_layers=len(layers),
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            scaling=layout.head_dim**-0.5,
            layers=self._layers,
            final_norm=self._pointer(text_model.norm.weight),
        )
        self._vocab = int(lm_head.weight.shape[0])
        self._lm_head = self._pointer(lm_head.weight)
        count = library.foveate_scratch_floats
        count.restype = ctypes.c_int64
        self._scratch_floats_per_row = int(count(ctypes.byref(self._model), ctypes.c_int32(1)))

    @classmethod
    def load(cls, text_model: Any, lm_head: Any, layout: KvLayout) -> NativeDecoder | None:
        """Returns the decoder, or None when the kernel cannot be built here or does not fit the model's widths."""
        config = text_model.config
        widths = (config.hidden_size, config.intermediate_size, layout.head_dim // 2, lm_head.weight.shape[0])
        if any(width % _LANES for width in widths) or layout.head_dim % _VALUE_CHUNK or lm_head.bias is not None:
            return None
        library = build.load()
        return None if library is None else cls(library, text_model, lm_head, layout)

    def forward(self, embeds: Tensor, cosines: Tensor, sines: Tensor, kv: KvView) -> Tensor:
        """Returns hidden states after the final norm, [num_rows, hidden]; writes the rows' keys and values.

        `cosines` and `sines` are float32 [num_rows, head_dim / 2], one angle a pair of columns.
        """
        hidden = embeds.clone().contiguous()
        num_rows = hidden.shape[0]
        scratch = torch.empty(num_rows * self._scratch_floats_per_row)
        context, thread = _Slab(), _slab(*kv.thread, kv.thread_len)
        if kv.context is not None:
            context = _slab(*kv.context, kv.context_len)
        self._decode(
            ctypes.byref(self._model),
            ctypes.c_int32(num_rows),
            ctypes.c_void_p(hidden.data_ptr()),
            ctypes.c_void_p(cosines.data_ptr()),
            ctypes.c_void_p(sines.data_ptr()),
            ctypes.byref(context),
            ctypes.byref(thread),
            ctypes.c_void_p(scratch.data_ptr()),
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [num_rows, vocab] of hidden states [num_rows, hidden]."""
        rows = hidden.contiguous()
        logits = torch.empty(rows.shape[0], self._vocab)
        self._linear(
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_int32(rows.shape[0]),
            ctypes.c_int32(rows.shape[1]),
            ctypes.c_void_p(self._lm_head),
            ctypes.c_int32(self._vocab),
            ctypes.c_void_p(logits.data_ptr()),
        )
        return logits

    def _layer(self, module: Any) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return _Layer(
            input_norm=self._pointer(module.input_layernorm.weight),
            qkv=self._pointer(torch.cat([projection.weight for projection in projections])),
            qkv_bias=self._pointer(torch.cat([projection.bias for projection in projections])),
            output=self._pointer(attention.o_proj.weight),
            mlp_norm=self._pointer(module.post_attention_layernorm.weight),
            gate_up=self._pointer(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
            down=self._pointer(mlp.down_proj.weight),
        )

    def _pointer(self, weight: Tensor) -> int:
        kept = weight.detach().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _slab(keys: Tensor, values: Tensor, length: int) -> _Slab:
    layer_stride, head_stride, row_stride, _ = keys.stride()
    assert row_stride == keys.shape[3], "rows of a slab lie one behind the other"
    return _Slab(keys.data_ptr(), values.data_ptr(), layer_stride, head_stride, length)
