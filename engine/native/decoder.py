"""The compiled step: a text model's layers in one call, for the rows of any number of sequences."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import KvView
from engine.batch import Block, Output
from engine.decoder import Decoder, head_norm
from engine.layout import KvLayout
from engine.native import build
from engine.native.rotations import Rotations
from engine.positions import text_positions
from engine.selection import ScoreTap

MAX_ROWS = 512
_PAGED_ROWS = 64  # angles of more rows are not kept
_LANES = 8
_VALUE_CHUNK = 32
_PANEL = 32


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_out", ctypes.c_int32),
        ("width", ctypes.c_int32),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("qkv", _Matrix),
        ("output", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
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
        ("embedding", ctypes.c_void_p),
        ("layers", ctypes.POINTER(_Layer)),
        ("final_norm", ctypes.c_void_p),
        ("lm_head", _Matrix),
    )


class _Slab(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("layer_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("len", ctypes.c_int32),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        ("token_ids", ctypes.POINTER(ctypes.c_int32)),
        ("embeds", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("context", _Slab),
        ("thread", _Slab),
        ("tapped", ctypes.c_void_p),
        ("queries", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("added", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("tapped_layer", ctypes.c_int32),
        ("num_chosen", ctypes.c_int32),
        ("first_scoring", ctypes.c_int32),
        ("is_max", ctypes.c_int32),
        ("num_added", ctypes.c_int32),
    )


class NativeDecoder:
    """Runs steps of at most MAX_ROWS rows, one at a time: they share a scratch.

    A row's bits do not depend on the rows it is computed with, its own sequence's or another's.
    """

    name = "cpu-native"

    def __init__(
        self,
        library: ctypes.CDLL,
        text_model: Any,
        lm_head: Any,
        layout: KvLayout,
        decoder: Decoder,
        never_chosen: Tensor,
    ) -> None:
        config = text_model.config
        self._vocab, self._hidden = (int(size) for size in lm_head.weight.shape)
        self._num_embeddings = int(text_model.embed_tokens.weight.shape[0])
        self._kept: list[Tensor] = []  # owns the memory behind the pointers
        layers = [self._layer(module) for module in text_model.layers]
        self._model = _Model(
            num_layers=len(layers),
            hidden=self._hidden,
            num_heads=config.num_attention_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            scaling=layout.head_dim**-0.5,
            embedding=self._pointer(text_model.embed_tokens.weight),
            layers=(_Layer * len(layers))(*layers),
            final_norm=self._pointer(text_model.norm.weight),
            lm_head=self._matrix(lm_head.weight, torch.zeros(self._vocab).masked_fill_(never_chosen, float("-inf"))),
        )
        self._reference = ctypes.byref(self._model)
        self._step = _function(library.foveate_step, None, 2, ctypes.c_int32, *(ctypes.c_void_p,) * 4)
        self._logits = _function(library.foveate_logits, None, 2, ctypes.c_int32, ctypes.c_void_p)
        self._count = _function(library.foveate_scratch_floats, ctypes.c_int64, 1, ctypes.c_int32)
        self._scratch = torch.empty(0)
        self._scratch_rows = 0
        self._half_rotation = decoder.half_rotation
        self._rotations = Rotations(self._half_rotation, max_rows=_PAGED_ROWS)

    @classmethod
    def load(
        cls,
        text_model: Any,
        lm_head: Any,
        layout: KvLayout,
        *,
        decoder: Decoder,
        never_chosen: Tensor,
        cache: Path,
    ) -> NativeDecoder | None:
        """Returns the decoder, or None when the kernel cannot be built here or does not fit the model's widths.

        `decoder` is the same model's, for the angles; `never_chosen` bool [vocab]: tokens whose logits are -inf.
        """
        config = text_model.config
        widths = (config.hidden_size, config.intermediate_size, layout.head_dim // 2, lm_head.weight.shape[0])
        if any(width % _LANES for width in widths) or layout.head_dim % _VALUE_CHUNK or lm_head.bias is not None:
            return None
        library = build.load(cache)
        return None if library is None else cls(library, text_model, lm_head, layout, decoder, never_chosen)

    def run(self, blocks: Sequence[Block]) -> list[Output]:
        """Runs one step over all blocks, of different sequences; writes their keys and values. Outputs in order."""
        # Sequences on one context side by side: its keys are read once for all of them.
        order = sorted(range(len(blocks)), key=lambda index: _context_key(blocks[index].kv))
        ordered = [blocks[index] for index in order]
        num_rows = sum(block.num_rows for block in blocks)
        num_chosen = sum(block.num_chosen for block in blocks)
        hidden, logits = torch.empty(num_rows, self._hidden), torch.empty(num_chosen, self._vocab)
        chosen = (ctypes.c_int32 * num_chosen)()
        kept: list[Any] = []  # owns what the parts point to until the step is over
        states = [self._states(block) for block in ordered]
        queries = [self._queries(block) for block in ordered]
        scores = [self._scores(block) for block in ordered]
        parts = (_Part * len(ordered))(*map(self._part, ordered, states, queries, scores, [kept] * len(ordered)))
        scratch = self._scratch_of(num_rows)
        self._step(self._reference, parts, len(parts), scratch, hidden.data_ptr(), logits.data_ptr(), chosen)
        ends = accumulate(block.num_rows for block in ordered)
        chosen_ends = accumulate(block.num_chosen for block in ordered)
        outputs: dict[int, Output] = {}
        for index, block, end, stop, own, asked, scored in zip(
            order, ordered, ends, chosen_ends, states, queries, scores, strict=True
        ):
            own_hidden, start = hidden[end - block.num_rows : end], stop - block.num_chosen
            if block.states_layer == self._model.num_layers:
                own = own_hidden
            outputs[index] = Output(own_hidden, logits[start:stop], chosen[start:stop], own)
            if scored is not None:
                _score_tap(block).take(scored)
            elif block.query_tap is not None and asked is not None:
                for layer, query in enumerate(asked):
                    block.query_tap.on_layer(layer, query)
        return [outputs[index] for index in range(len(blocks))]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [num_rows, vocab] of hidden states [num_rows, hidden]."""
        rows = hidden.contiguous()
        logits = torch.empty(rows.shape[0], self._vocab)
        self._logits(self._reference, rows.data_ptr(), rows.shape[0], logits.data_ptr())
        return logits

    def _part(
        self, block: Block, states: Tensor | None, queries: Tensor | None, scores: Tensor | None, kept: list[Any]
    ) -> _Part:
        num_rows, kv = block.num_rows, block.kv
        first_scoring, is_max = (0, False) if scores is None else _score_tap(block).scoring
        ids, embeds = None, None
        if block.embeds is None:
            if not 0 <= min(block.token_ids) <= max(block.token_ids) < self._num_embeddings:
                raise IndexError(f"token ids must be below {self._num_embeddings}")
            ids = (ctypes.c_int32 * num_rows)(*block.token_ids)
        else:
            rows = block.embeds.contiguous()
            kept.append(rows)
            embeds = rows.data_ptr()
        cosines, sines = self._angles(block, kept)
        added = None if block.added is None else block.added.contiguous()
        kept.append(added)
        return _Part(
            token_ids=ids,
            embeds=embeds,
            cosines=cosines,
            sines=sines,
            context=_Slab() if kv.context is None else _slab(*kv.context, kv.context_len),
            thread=_slab(*kv.thread, kv.thread_len),
            tapped=None if states is None else states.data_ptr(),
            queries=None if queries is None else queries.data_ptr(),
            scores=None if scores is None else scores.data_ptr(),
            added=None if added is None else added.data_ptr(),
            num_rows=num_rows,
            tapped_layer=-1 if block.states_layer is None else block.states_layer,
            num_chosen=block.num_chosen,
            first_scoring=first_scoring,
            is_max=is_max,
            num_added=0 if added is None else added.shape[0],
        )

    def _angles(self, block: Block, kept: list[Any]) -> tuple[int, int]:
        num_rows, positions = block.num_rows, block.positions
        if positions is None and num_rows <= _PAGED_ROWS:
            return self._rotations.pointers(block.position, num_rows, kept)
        if positions is None:
            positions = text_positions(block.position, num_rows)
        cosines, sines = (angles.contiguous() for angles in self._half_rotation(positions))
        kept += (cosines, sines)
        return cosines.data_ptr(), sines.data_ptr()

    def _states(self, block: Block) -> Tensor | None:
        if block.states_layer is None or block.states_layer == self._model.num_layers:
            return None
        assert 0 <= block.states_layer < self._model.num_layers
        return torch.empty(block.num_rows, self._hidden)

    def _queries(self, block: Block) -> Tensor | None:
        """Room for the queries of all layers when a tap wants them, [num_layers, num_heads, num_rows, head_dim]."""
        model = self._model
        if block.query_tap is None or _computes_scores(block):
            return None
        return torch.empty(model.num_layers, model.num_heads, block.num_rows, model.head_dim)

    def _scores(self, block: Block) -> Tensor | None:
        """Room for the attention that the context gets, [num_layers, num_kv_heads, context_len]."""
        model = self._model
        if not _computes_scores(block):
            return None
        return torch.zeros(model.num_layers, model.num_kv_heads, block.kv.context_len)

    def _scratch_of(self, num_rows: int) -> int:
        if num_rows > self._scratch_rows:
            self._scratch_rows = num_rows
            self._scratch = torch.empty(self._count(self._reference, num_rows))
        return self._scratch.data_ptr()

    def _layer(self, module: Any) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        has_bias = attention.q_proj.bias is not None
        norms = [head_norm(attention, name) for name in ("q_norm", "k_norm")]
        return _Layer(
            input_norm=self._pointer(module.input_layernorm.weight),
            mlp_norm=self._pointer(module.post_attention_layernorm.weight),
            query_norm=None if norms[0] is None else self._pointer(norms[0]),
            key_norm=None if norms[1] is None else self._pointer(norms[1]),
            qkv=self._matrix(
                torch.cat([projection.weight for projection in projections]),
                torch.cat([projection.bias for projection in projections]) if has_bias else None,
            ),
            output=self._matrix(attention.o_proj.weight),
            gate_up=self._matrix(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
            down=self._matrix(mlp.down_proj.weight),
        )

    def _matrix(self, weight: Tensor, bias: Tensor | None = None) -> _Matrix:
        """Packs [num_out, width] as panels [num_out / _PANEL, width, _PANEL], the last one filled up with zeros."""
        num_out, width = weight.shape
        filled = F.pad(weight.detach(), (0, 0, 0, -num_out % _PANEL))
        panels = filled.view(-1, _PANEL, width).transpose(1, 2)
        return _Matrix(self._pointer(panels), None if bias is None else self._pointer(bias), num_out, width)

    def _pointer(self, weight: Tensor) -> int:
        kept = weight.detach().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _function(function: Any, result: Any, num_pointers: int, *rest: Any) -> Any:
    function.restype = result
    function.argtypes = (ctypes.c_void_p,) * num_pointers + rest
    return function


def _computes_scores(block: Block) -> bool:
    """Whether a block's tap wants the scores that the kernel computes, and not the queries themselves."""
    return isinstance(block.query_tap, ScoreTap) and block.query_tap.scores_to_end_of(block.num_rows)


def _score_tap(block: Block) -> ScoreTap:
    assert isinstance(block.query_tap, ScoreTap)
    return block.query_tap


def _context_key(kv: KvView) -> tuple[int, int]:
    return (0, 0) if kv.context is None else (kv.context[0].data_ptr(), kv.context_len)


def _slab(keys: Tensor, values: Tensor, length: int) -> _Slab:
    layer_stride, head_stride, row_stride, _ = keys.stride()
    assert row_stride == keys.shape[3], "rows of a slab lie one behind the other"
    return _Slab(keys.data_ptr(), values.data_ptr(), layer_stride, head_stride, length)
