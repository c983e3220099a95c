"""Choosing tokens with noise that drafter and verifier share, so that only token ids cross processes.

Gumbel-max: argmax(transformed logits + g) with independent Gumbel noise g is an exact sample of softmax(transformed
logits). Here g is a function of (seed, sequence index, token id) alone, so two processes that see the same logits
choose the same token, whatever block of positions they look at, and a draft is accepted iff the two ids are equal.
Greedy is the special case without noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.adjusting import Adjustments

_MASK = (1 << 64) - 1
# splitmix64's step and factors.
_GAMMA = 0x9E3779B97F4A7C15
_FACTOR_A = 0xBF58476D1CE4E5B9
_FACTOR_B = 0x94D049BB133111EB


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy, top_k 0 and top_p 1 keep every token. `seed` is 64 bits.

    `adjustments` come before temperature; None: the model's logits are taken as they are.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    adjustments: Adjustments | None = None


def choose(logits: Tensor, first_index: int, sampling: Sampling) -> list[int]:
    """Returns a token id per row of `logits` [num_rows, vocab]; row i is for sequence index first_index + i.

    Adjustments are made already.
    """
    if sampling.temperature == 0.0:
        return [int(token_id) for token_id in logits.argmax(dim=-1).tolist()]
    scaled, token_ids = transformed(logits, sampling)
    noise = gumbel_noise(sampling.seed, range(first_index, first_index + logits.shape[0]), token_ids)
    best = scaled.add_(noise).argmax(dim=-1, keepdim=True)
    return [int(token_id) for token_id in token_ids.expand_as(scaled).gather(1, best)[:, 0].tolist()]


def transformed(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Returns scaled logits, float64 [num_rows, n], and token ids [num_rows or 1, n]; cut ones are absent or -inf.

    Temperature, then top-k, then top-p over what is left. Ties are broken by token id, the lower one first.
    """
    scaled = logits.double() / sampling.temperature
    vocab = scaled.shape[-1]
    if not 0 < sampling.top_k < vocab and sampling.top_p >= 1.0:
        return scaled, torch.arange(vocab, device=logits.device).unsqueeze(0)
    ordered, token_ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < vocab:
        ordered, token_ids = ordered[:, : sampling.top_k], token_ids[:, : sampling.top_k]
    if sampling.top_p < 1.0:
        probabilities = torch.softmax(ordered, dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # mass of the likelier tokens; 0 for the likeliest
        ordered = ordered.masked_fill(before >= sampling.top_p, float("-inf"))
    return ordered, token_ids


def gumbel_noise(seed: int, indices: Sequence[int], token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise, float64 [num_rows, n], keyed by seed, indices[i] and token id."""
    return uniform(seed, indices, token_ids).log_().neg_().log_().neg_()


def uniform(seed: int, indices: Sequence[int], token_ids: Tensor) -> Tensor:
    """Returns numbers in (0, 1) with 52 random bits, float64, keyed as above; bit-equal on every device.

    Row i is the splitmix64 generator (Steele et al., OOPSLA 2014) started at a hash of seed and index, read at step
    `token id`. int64 arithmetic wraps around, as the generator's uint64 does.
    """
    starts = [_signed(_mix((_mix(seed & _MASK) + index) & _MASK)) for index in indices]
    state = torch.tensor(starts, dtype=torch.int64, device=token_ids.device).unsqueeze(1) + token_ids * _signed(_GAMMA)
    state ^= _shifted(state, 30)
    state *= _signed(_FACTOR_A)
    state ^= _shifted(state, 27)
    state *= _signed(_FACTOR_B)
    state ^= _shifted(state, 31)
    return _shifted(state, 12).double().add_(0.5).mul_(math.ldexp(1.0, -52))


def _shifted(state: Tensor, bits: int) -> Tensor:
    # A logical shift to the right: the sign must not be dragged along.
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FACTOR_A) & _MASK
    value = ((value ^ (value >> 27)) * _FACTOR_B) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
