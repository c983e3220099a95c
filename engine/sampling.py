"""Choosing tokens with noise that drafter and verifier share, so that only token ids cross processes.

Gumbel-max: argmax(transformed logits + g) with independent Gumbel noise g is an exact sample of softmax(transformed
logits). Here g is a function of (seed, sequence index, token id) alone, so two processes that see the same logits
choose the same token, whatever block of positions they look at, and a draft is accepted iff the two ids are equal.
Greedy is the special case without noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy, top_k 0 and top_p 1 keep every token. `seed` is 64 bits."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def choose(logits: Tensor, first_index: int, sampling: Sampling) -> list[int]:
    """Returns a token id per row of `logits` [num_rows, vocab]; row i is for sequence index first_index + i."""
    if sampling.temperature == 0.0:
        return [int(token_id) for token_id in logits.argmax(dim=-1).tolist()]
    return [_sample(row, first_index + offset, sampling) for offset, row in enumerate(logits)]


def transformed(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Returns (scaled logits float64, token ids) of what a row [vocab] may choose, likeliest first if truncated.

    Temperature, then top-k, then top-p over what is left. Ties are broken by token id, the lower one first.
    """
    scaled = logits.double() / sampling.temperature
    vocab = scaled.shape[-1]
    if not 0 < sampling.top_k < vocab and sampling.top_p >= 1.0:
        return scaled, torch.arange(vocab, device=logits.device)
    ordered, token_ids = torch.sort(scaled, descending=True, stable=True)
    if 0 < sampling.top_k < vocab:
        ordered, token_ids = ordered[: sampling.top_k], token_ids[: sampling.top_k]
    if sampling.top_p < 1.0:
        probabilities = torch.softmax(ordered, dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # mass of the likelier tokens
        num_kept = max(1, int((before < sampling.top_p).sum()))
        ordered, token_ids = ordered[:num_kept], token_ids[:num_kept]
    return ordered, token_ids


def gumbel_noise(seed: int, index: int, token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise, float64, keyed by seed, sequence index and each of `token_ids` (int64)."""
    return -torch.log(-torch.log(uniform(seed, index, token_ids)))


def uniform(seed: int, index: int, token_ids: Tensor) -> Tensor:
    """Returns numbers in (0, 1) with 52 random bits, float64, keyed as above; bit-equal on every device.

    Two rounds of murmur3's 32-bit finaliser over the token id, each under its own half of a 64-bit key made from seed
    and index.
    """
    key = _mix_64((_mix_64(seed & _MASK_64) + index) & _MASK_64)
    low, high = key & _MASK_32, key >> 32
    first = _mix_32(_mix_32(token_ids ^ low) ^ high)
    second = _mix_32((_mix_32(first ^ low ^ 0x9E3779B9) + token_ids) & _MASK_32)
    bits = (first << 20) | (second >> 12)  # 52 bits
    return (bits.double() + 0.5) * math.ldexp(1.0, -52)


def _sample(row: Tensor, index: int, sampling: Sampling) -> int:
    scaled, token_ids = transformed(row, sampling)
    best = torch.argmax(scaled + gumbel_noise(sampling.seed, index, token_ids))
    return int(token_ids[best])


def _mix_32(values: Tensor) -> Tensor:
    values = values ^ (values >> 16)
    values = _multiply_32(values, 0x85EBCA6B)
    values = values ^ (values >> 13)
    values = _multiply_32(values, 0xC2B2AE35)
    return values ^ (values >> 16)


def _multiply_32(values: Tensor, factor: int) -> Tensor:
    # The product modulo 2**32 in halves: no step leaves the range of int64, so no device can disagree on overflow.
    low = (values & 0xFFFF) * factor
    high = ((values >> 16) * factor & 0xFFFF) << 16
    return (low + high) & _MASK_32


def _mix_64(value: int) -> int:
    # splitmix64's finaliser, in Python integers: once per row.
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
