"""Attention that answers need is taught directly: an option's word looks at its letter, a letter at the option that is
right, a yes at the claimed word and a no at the question mark behind it, a background at the cells of its thing.

From the answers alone these are not learned: each is of no use without the others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import rotate_half

from bench.world.facts import WORDS_BY_FACT
from bench.world.questions import ASKABLE, LETTERS

LETTER_TO_WORD = 2  # tokens from an option's letter to its word: " A", ".", " circle"
TO_LETTER, TO_OPTION = 0, 1


@dataclass(frozen=True)
class Link:
    """Where a token of a sequence should look."""

    kind: int  # TO_LETTER or TO_OPTION
    query: int
    key: int


class Links:
    """Finds a conversation's links by its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        def only(text: str) -> int:
            (token_id,) = tokenizer(text)["input_ids"]
            return int(token_id)

        self._letters = {only(form): letter for letter in LETTERS for form in (letter, f" {letter}")}
        self._dot, self._question_mark = only("."), only("?")
        self._claimable = {only(f" {word}") for kind in ASKABLE for word in WORDS_BY_FACT[kind]}
        verdicts = {"Yes": True, "No": False, " yes": True, " no": False}
        self._agrees = {tokenizer(form)["input_ids"][0]: agrees for form, agrees in verdicts.items()}

    def find(self, token_ids: Sequence[int], is_learned: Sequence[bool]) -> list[Link]:
        links: list[Link] = []
        option_at: dict[str, int] = {}
        claimed_at: int | None = None
        for index, token_id in enumerate(token_ids):
            if token_id == self._question_mark:
                claimed_at = index - 1 if token_ids[index - 1] in self._claimable else None
            elif token_id in self._agrees and is_learned[index] and claimed_at is not None:
                links.append(Link(TO_OPTION, index - 1, claimed_at if self._agrees[token_id] else claimed_at + 1))
            letter = self._letters.get(token_id)
            if letter is None:
                continue
            if is_learned[index]:
                if letter in option_at:
                    links.append(Link(TO_OPTION, index - 1, option_at[letter]))
            elif index + LETTER_TO_WORD < len(token_ids) and token_ids[index + 1] == self._dot:
                option_at[letter] = index + LETTER_TO_WORD
                links.append(Link(TO_LETTER, index + LETTER_TO_WORD, index))
        return links


def link_table(links_by_row: Iterable[Sequence[Link]]) -> Tensor:
    """[num_links, 4]: kind, row, query, key"""
    table = [(link.kind, row, link.query, link.key) for row, links in enumerate(links_by_row) for link in links]
    return torch.tensor(table, dtype=torch.long).reshape(-1, 4)


class Guide:
    """Sees what enters each layer of a text model, and so what its heads look at."""

    def __init__(self, text: Any) -> None:
        self._text = text
        self._layers = list(text.layers)
        self._inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(self._see(index), with_kwargs=True)

    def _see(self, index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._inputs[index] = (hidden, *kwargs["position_embeddings"])

        return hook

    def loss(self, links: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of the last forward: how far the lower half of the layers is from looking at letters, the upper at options.

        links [num_links, 4]: kind, row, query, key; mask [num_rows, L, L], None: causal. Of the heads of a half any may
        do it: the loss is - log of the mean over heads of the attention to the key.
        """
        half = len(self._layers) // 2
        out = []
        for kind, layers in ((TO_LETTER, range(half)), (TO_OPTION, range(half, len(self._layers)))):
            chosen = links[links[:, 0] == kind, 1:]
            if not len(chosen):
                out.append(links.new_zeros((), dtype=torch.float32))
                continue
            query, key = chosen[:, :2], chosen[:, 2, None, None]
            attention = torch.cat([self._attention(index, query, mask) for index in layers], dim=1)
            found = attention.gather(2, key.expand(-1, attention.shape[1], 1))[..., 0]
            out.append(-(found.mean(dim=1) + 1e-6).log().mean())
        return out[0], out[1]

    def naming(self, names: Tensor) -> Tensor:
        """Of the last forward: how far what enters the last layer is from saying the word that an answer rests on.

        names [num_names, 3]: row, position, token
        """
        row, at, token_ids = names.unbind(1)
        hidden = self._text.norm(self._inputs[len(self._layers) - 1][0][row, at])
        return F.cross_entropy(F.linear(hidden, self._text.embed_tokens.weight), token_ids)

    def looking(self, looks: Tensor, shown: Tensor, mask: Tensor) -> Tensor:
        """Of the last forward: how far every head above the first layer is from looking at what is shown.

        looks [num_looks, 2]: row, query; shown [num_looks, L], True where to look; mask [num_rows, L, L]. One head that
        looks there is enough: the loss is - log of the chance that not all look elsewhere.
        """
        attention = torch.cat([self._attention(index, looks, mask) for index in range(1, len(self._layers))], dim=1)
        elsewhere = (1 - (attention * shown[:, None]).sum(-1)).clamp(min=0).prod(dim=1)
        return -(1 - elsewhere + 1e-6).log().mean()

    def _attention(self, index: int, queries: Tensor, mask: Tensor | None) -> Tensor:
        """What queries [num_queries, 2] (row, position) look at: [num_queries, num_heads, L]"""
        layer = self._layers[index]
        hidden, cos, sin = self._inputs[index]
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        row, query = queries.unbind(1)
        dim = attention.head_dim
        q = attention.q_proj(normed[row, query]).unflatten(-1, (-1, dim))  # [num_queries, num_heads, dim]
        k = attention.k_proj(normed).unflatten(-1, (-1, dim))  # [num_rows, L, num_kv_heads, dim]
        q = _rotated(q, cos[row, query], sin[row, query])
        k = _rotated(k, cos, sin)[row].repeat_interleave(attention.num_key_value_groups, dim=2)
        scores = torch.einsum("nhd,nlhd->nhl", q, k) * attention.scaling
        causal = torch.arange(k.shape[1], device=q.device) <= query[:, None]
        allowed = causal if mask is None else mask[row, query]
        scores = scores.masked_fill(~allowed[:, None], float("-inf"))
        out: Tensor = scores.softmax(-1)
        return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., num_heads, dim] by cos and sin [..., dim]"""
    rotated: Tensor = x * cos[..., None, :] + rotate_half(x) * sin[..., None, :]
    return rotated
