"""A text model's forward over KV that lives elsewhere: transformers' layers, our attention, explicit positions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention import KvView, QueryTap, Step, choose_kernel
from engine.attention.cpu_canonical import MIN_ROWS
from engine.batch import Block, Output
from engine.decoder import Decoder
from engine.loading import LoadedModel
from engine.native.decoder import MAX_ROWS, NativeDecoder
from engine.positions import text_positions
from engine.relevance import LayerTap


class TextRunner:
    """Runs a model's text part; stateless: everything a forward reads or writes is in its arguments.

    `run` is a step over the rows of any number of sequences: in one pass where there is a compiled kernel, one after
    the other elsewhere. Where `is_deterministic` holds, the bits of a step's row, and of its logits, do not depend on
    the rows beside it. `forward` runs one sequence on PyTorch's kernels.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        deterministic: bool = False,
        use_decoder: bool = True,
        kernel_cache: Path | None = None,
    ) -> None:
        """Raises ValueError when determinism is asked for and the device has no such kernel.

        `use_decoder` False runs transformers' own forward even where ours is equal to it. The compiled kernel is kept
        in `kernel_cache`; without that, steps run on PyTorch's kernels.
        """
        self._kernel = choose_kernel(loaded.device, deterministic=deterministic)
        self._min_rows = MIN_ROWS if deterministic else 1
        self._family = loaded.family
        self._text_model = loaded.family.text_model(loaded.model)
        self._lm_head = loaded.family.lm_head(loaded.model)
        self._embedding = self._text_model.embed_tokens
        has_decoder = use_decoder and self._family.has_plain_layers
        self._decoder = None
        if has_decoder and Decoder.supports(self._text_model, loaded.device):
            self._decoder = Decoder(self._text_model, self._family.axis_of_frequency(self._text_model.config))
        self._never_chosen = _never_chosen(loaded, self._lm_head.weight.shape[0])
        self._native = None
        if self._decoder is not None and kernel_cache is not None:
            self._native = NativeDecoder.load(
                self._text_model,
                self._lm_head,
                loaded.layout,
                decoder=self._decoder,
                never_chosen=self._never_chosen,
                cache=kernel_cache,
            )
        self.is_deterministic = deterministic or self._native is not None
        self._num_heads = int(self._text_model.config.num_attention_heads)
        self.num_layers = loaded.layout.num_layers
        self.hidden_size = int(self._lm_head.weight.shape[1])
        self._device = loaded.device
        self.eos_token_ids = loaded.eos_token_ids
        self.scaling = loaded.layout.head_dim**-0.5

    @property
    def kernel_name(self) -> str:
        """Name of the kernel that steps run on."""
        return self._kernel.name if self._native is None else self._native.name

    @torch.inference_mode()
    def forward(
        self,
        *,
        token_ids: Sequence[int] | None = None,
        embeds: Tensor | None = None,
        positions: Tensor,
        kv: KvView,
        query_tap: QueryTap | None = None,
        layer_tap: LayerTap | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """Returns hidden states after the final norm, [num_new, hidden], of new tokens given as ids or as embeddings.

        `positions` int64 [3, num_new], `added` as a Block's. Writes the new keys and values to the thread at
        `kv.thread_len` and leaves `thread_len` to the caller. New tokens see the context, the thread and, causally,
        each other. Taps see padding rows last. Raises ValueError when the thread has no room.
        """
        if embeds is None:
            embeds = self.embed(token_ids or ())
        num_new = embeds.shape[0]
        _check_room(kv, num_new)
        num_rows = max(num_new, self._min_rows)
        if num_rows > num_new:
            embeds, positions = _pad_rows(embeds, num_rows), _pad_rows(positions.T, num_rows).T
            added = None if added is None else _pad_rows(added.transpose(0, 1), num_rows).transpose(0, 1)
        plan = self._kernel.plan(kv, num_new, num_rows, num_heads=self._num_heads, scaling=self.scaling)
        step = Step(kv, num_new, plan, query_tap)
        hidden = self._run(embeds, positions.to(self._device), step, layer_tap, added)
        if layer_tap is not None and layer_tap.layer == self.num_layers:
            layer_tap.take(hidden)
        return hidden[:num_new]

    @property
    def max_rows(self) -> int | None:
        """Most rows that one pass takes together; None where blocks run one after the other anyway."""
        return None if self._native is None else MAX_ROWS

    @torch.inference_mode()
    def run(self, blocks: Sequence[Block]) -> list[Output]:
        """Runs a step over blocks of different sequences; outputs in order. Raises ValueError for one without room."""
        for block in blocks:
            _check_room(block.kv, block.num_rows)
        before_s = time.perf_counter()
        if self._native is not None and sum(block.num_rows for block in blocks) <= MAX_ROWS:
            outputs = self._native.run(blocks)
        else:
            outputs = [self._run_alone(block) for block in blocks]
        step_s = time.perf_counter() - before_s
        for output in outputs:
            output.step_s = step_s
        return outputs

    def step(self, *, token_ids: Sequence[int], position: int, kv: KvView) -> Tensor:
        """Returns hidden states after the final norm, [num_new, hidden], of a step of one sequence."""
        (output,) = self.run([Block(kv, token_ids, position)])
        return output.hidden

    def _run_alone(self, block: Block) -> Output:
        if self._native is not None and block.num_rows <= MAX_ROWS:
            return self._native.run([block])[0]
        positions = block.positions
        if positions is None:
            positions = text_positions(block.position, block.num_rows)
        tap = None if block.states_layer is None else LayerTap(block.states_layer)
        hidden = self.forward(
            token_ids=block.token_ids,
            embeds=block.embeds,
            positions=positions,
            kv=block.kv,
            query_tap=block.query_tap,
            layer_tap=tap,
            added=block.added,
        )
        logits = self.logits(hidden[hidden.shape[0] - block.num_chosen :])
        states = None if tap is None else tap.states[: block.num_rows]
        return Output(hidden, logits, logits.argmax(dim=-1).tolist() if block.num_chosen else [], states)

    def _run(
        self, embeds: Tensor, positions: Tensor, step: Step, layer_tap: LayerTap | None, added: Tensor | None
    ) -> Tensor:
        if self._decoder is not None:
            return self._decoder.forward(embeds, positions, step, layer_tap, added)
        more: dict[str, Any] = {}
        if added is not None:
            all_rows = torch.ones(1, embeds.shape[0], dtype=torch.bool, device=embeds.device)
            more = {"visual_pos_masks": all_rows, "deepstack_visual_embeds": list(added)}
        output = self._text_model(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=self._family.model_positions(positions),
            attention_mask={"full_attention": None},
            cache=None,
            use_cache=False,
            output_hidden_states=layer_tap is not None,
            step=step,
            **more,
        )
        # Under a device map the last layers, and with them what comes out, may lie elsewhere.
        if layer_tap is not None and layer_tap.layer < self.num_layers:
            layer_tap.take(output.hidden_states[layer_tap.layer][0].to(self._device))
        hidden: Tensor = output.last_hidden_state
        return hidden[0].to(self._device)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [num_rows, vocab]; ids that are no tokens, or that stand for vision, are -inf."""
        num_rows = hidden.shape[0]
        if num_rows == 0:
            return hidden.new_zeros(0, self._never_chosen.shape[0], dtype=torch.float32)
        if self._native is not None and num_rows <= MAX_ROWS:
            return self._native.logits(hidden)
        logits: Tensor = self._lm_head(_pad_rows(hidden, max(num_rows, self._min_rows)))[:num_rows]
        return logits.float().to(self._device).masked_fill_(self._never_chosen, float("-inf"))

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Returns input embeddings, [num_tokens, hidden]."""
        embeds: Tensor = self._embedding(torch.tensor(token_ids, dtype=torch.int64, device=self._device))
        return embeds.to(self._device)


def _check_room(kv: KvView, num_new: int) -> None:
    if not 0 < num_new <= kv.capacity - kv.thread_len:
        raise ValueError(f"thread has room for {kv.capacity - kv.thread_len} more tokens, not {num_new}")


def _pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Repeats the last row until there are `num_rows`."""
    missing = num_rows - rows.shape[0]
    return rows if missing <= 0 else torch.cat([rows, rows[-1:].expand(missing, -1)])


def _never_chosen(loaded: LoadedModel, vocab: int) -> Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[loaded.tokenizer.get_vocab_size(with_added_tokens=True) :] = True
    mask[list(loaded.family.placeholder_token_ids)] = True
    return mask.to(loaded.device)
