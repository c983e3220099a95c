"""A text model's forward over KV that lives elsewhere: transformers' layers, our attention, explicit positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention import KvView, QueryTap, Step, choose_kernel
from engine.attention.cpu_canonical import MIN_ROWS
from engine.decoder import Decoder
from engine.loading import LoadedModel
from engine.native.decoder import MAX_ROWS, NativeDecoder


class TextRunner:
    """Runs a model's text part; stateless: everything a forward reads or writes is in its arguments.

    `forward` is for prompts, `step` for the few rows of a draft, a verification or a plain step. Where
    `is_deterministic` holds, the bits of a step's row, and of its logits, do not depend on the rows beside it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        deterministic: bool = False,
        use_decoder: bool = True,
        use_native: bool = True,
    ) -> None:
        """Raises ValueError when determinism is asked for and the device has no such kernel.

        `use_decoder` False runs transformers' own forward even where ours is equal to it, `use_native` False steps with
        PyTorch's kernels even where the compiled one can be had.
        """
        self._kernel = choose_kernel(loaded.device, deterministic=deterministic)
        self._min_rows = MIN_ROWS if deterministic else 1
        self._text_model = loaded.family.text_model(loaded.model)
        self._lm_head = loaded.family.lm_head(loaded.model)
        self._embedding = self._text_model.embed_tokens
        has_decoder = use_decoder and Decoder.supports(self._text_model, loaded.device)
        self._decoder = Decoder(self._text_model) if has_decoder else None
        self._native = (
            NativeDecoder.load(self._text_model, self._lm_head, loaded.layout) if has_decoder and use_native else None
        )
        self.is_deterministic = deterministic or self._native is not None
        self._num_heads = int(self._text_model.config.num_attention_heads)
        self._device = loaded.device
        self._never_chosen = _never_chosen(loaded, self._lm_head.weight.shape[0])
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
    ) -> Tensor:
        """Returns hidden states after the final norm, [num_new, hidden], of new tokens given as ids or as embeddings.

        `positions` int64 [3, num_new]. Writes the new keys and values to the thread at `kv.thread_len` and leaves
        `thread_len` to the caller. New tokens see the context, the thread and, causally, each other. A tap sees
        padding rows last. Raises ValueError when the thread has no room.
        """
        if embeds is None:
            embeds = self.embed(token_ids or ())
        num_new = embeds.shape[0]
        _check_room(kv, num_new)
        num_rows = max(num_new, self._min_rows)
        if num_rows > num_new:
            embeds, positions = _pad_rows(embeds, num_rows), _pad_rows(positions.T, num_rows).T
        plan = self._kernel.plan(kv, num_new, num_rows, num_heads=self._num_heads, scaling=self.scaling)
        step = Step(kv, num_new, plan, query_tap)
        return self._run(embeds, positions.to(self._device), step)[:num_new]

    @torch.inference_mode()
    def step(self, *, token_ids: Sequence[int], positions: Tensor, kv: KvView) -> Tensor:
        """Does for a few tokens of decoding what `forward` does, faster where there is a compiled kernel."""
        num_new = len(token_ids)
        if self._native is None or self._decoder is None or num_new > MAX_ROWS:
            return self.forward(token_ids=token_ids, positions=positions, kv=kv)
        _check_room(kv, num_new)
        cosines, sines = self._decoder.half_rotation(positions)
        return self._native.forward(self.embed(token_ids), cosines, sines, kv)

    def _run(self, embeds: Tensor, positions: Tensor, step: Step) -> Tensor:
        if self._decoder is not None:
            return self._decoder.forward(embeds, positions, step)
        hidden: Tensor = self._text_model(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=positions.unsqueeze(1),
            attention_mask={"full_attention": None},
            cache=None,
            use_cache=False,
            step=step,
        ).last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [num_rows, vocab]; ids that are no tokens, or that stand for vision, are -inf."""
        if self._native is not None and hidden.shape[0] <= MAX_ROWS:
            logits = self._native.logits(hidden)
        else:
            num_rows = hidden.shape[0]
            logits = self._lm_head(_pad_rows(hidden, max(num_rows, self._min_rows)))[:num_rows].float()
        return logits.masked_fill_(self._never_chosen, float("-inf"))

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Returns input embeddings, [num_tokens, hidden]."""
        embeds: Tensor = self._embedding(torch.tensor(token_ids, dtype=torch.int64, device=self._device))
        return embeds


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
