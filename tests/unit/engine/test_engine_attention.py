"""Kernels against plain softmax attention, and the deterministic kernel against itself in other blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.attention import AttentionKernel, KvView, choose_kernel
from engine.attention.base import Step
from engine.attention.cpu_canonical import CHUNK, MIN_ROWS, CanonicalKernel
from engine.attention.cpu_split import CpuPrimitives
from engine.attention.cuda_sdpa import plain_masked
from engine.attention.parts import LONG_PREFILL_ROWS, PartsKernel

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 32
SCALING = HEAD_DIM**-0.5


class PlainPrimitives(CpuPrimitives):
    """Matrix products as the CUDA kernel uses them for masked keys."""

    def masked(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        return plain_masked(query, keys, values, scaling, bias)


def rows(num_heads: int, num_rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, num_heads, num_rows, HEAD_DIM, generator=generator)


def make_view(context_len: int, thread_len: int, capacity: int) -> KvView:
    def piece(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
        return rows(NUM_KV_HEADS, num_rows, seed), rows(NUM_KV_HEADS, num_rows, seed + 1)

    thread = tuple(torch.zeros(1, NUM_KV_HEADS, capacity, HEAD_DIM) for _ in range(2))
    for target, source in zip(thread, piece(thread_len, 3), strict=True):
        target[:, :, :thread_len] = source
    return KvView(piece(context_len, 1) if context_len else None, (thread[0], thread[1]), thread_len)


def run(kernel: AttentionKernel, kv: KvView, new: tuple[Tensor, Tensor, Tensor], *, pad_to: int = 1) -> Tensor:
    query, key, value = new
    num_new = query.shape[2]
    num_rows = max(num_new, pad_to)
    padded = [
        torch.cat([part, part[:, :, -1:].expand(-1, -1, num_rows - num_new, -1)], dim=2) for part in (query, key, value)
    ]
    plan = kernel.plan(kv, num_new, num_rows, num_heads=NUM_HEADS, scaling=SCALING)
    return Step(kv, num_new, plan, None).attend(0, *padded)[0, :num_new]


def reference(kv: KvView, new: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Softmax attention in float64 over context, thread and, causally, the new rows: [num_new, num_heads, head_dim]."""
    query, key, value = (part[0].double() for part in new)
    num_new = query.shape[1]
    before = [part[0, :, : kv.thread_len].double() for part in kv.thread]
    context = [part[0].double() for part in kv.context] if kv.context else [part[:, :0] for part in before]
    group = NUM_HEADS // NUM_KV_HEADS
    keys = torch.cat([context[0], before[0], key], dim=1).repeat_interleave(group, 0)
    values = torch.cat([context[1], before[1], value], dim=1).repeat_interleave(group, 0)
    hidden = torch.ones(num_new, keys.shape[1], dtype=torch.bool).triu(keys.shape[1] - num_new + 1)
    scores = (query @ keys.transpose(1, 2) * SCALING).masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ values).transpose(0, 1)


KERNELS = {
    "split": (PartsKernel(CpuPrimitives()), 1),
    "plain": (PartsKernel(PlainPrimitives()), 1),
    "canonical": (CanonicalKernel(), MIN_ROWS),
}


NUM_NEW = (1, 2, 6, 17, LONG_PREFILL_ROWS + 9)
LENGTHS = ((0, 0), (0, 70), (130, 0), (2500, 33), (130, 2100))  # context_len, thread_len


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("num_new", "lengths"), [*zip(NUM_NEW, LENGTHS, strict=True), (1, (2500, 33)), (6, (130, 2100))]
)
def test_kernels_equal_plain_attention(kernel: str, num_new: int, lengths: tuple[int, int]) -> None:
    assert_equals_plain_attention(kernel, num_new, *lengths)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_new", NUM_NEW)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_kernels_equal_plain_attention_everywhere(kernel: str, num_new: int, lengths: tuple[int, int]) -> None:
    assert_equals_plain_attention(kernel, num_new, *lengths)


def assert_equals_plain_attention(kernel: str, num_new: int, context_len: int, thread_len: int) -> None:
    kv = make_view(context_len, thread_len, capacity=thread_len + num_new)
    new = (rows(NUM_HEADS, num_new, 7), rows(NUM_KV_HEADS, num_new, 8), rows(NUM_KV_HEADS, num_new, 9))
    chosen, pad_to = KERNELS[kernel]
    out = run(chosen, kv, new, pad_to=pad_to)
    torch.testing.assert_close(out.double(), reference(kv, new), atol=2e-6, rtol=1e-5)
    assert torch.equal(kv.thread[0][0, :, thread_len:], new[1][0])
    assert torch.equal(kv.thread[1][0, :, thread_len:], new[2][0])


CONTEXT_LENS = (0, 1, 2, 77, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 63)
THREAD_LENS = (0, 1, 58, 63, 64, 120, CHUNK - 9, CHUNK)
SPARES = (0, 3, 500)


@pytest.mark.parametrize(
    ("context_len", "thread_len", "spare"),
    [
        (0, 0, 0),
        (1, 63, 3),
        (2, CHUNK - 9, 3),
        (77, 58, 500),
        (CHUNK - 1, 64, 0),
        (CHUNK + 1, CHUNK, 3),
        (2 * CHUNK + 63, 120, 500),
    ],
)
def test_canonical_rows_have_the_same_bits_in_every_block(context_len: int, thread_len: int, spare: int) -> None:
    assert_same_bits_in_every_block(context_len, thread_len, spare)


@pytest.mark.slow
@pytest.mark.parametrize("context_len", CONTEXT_LENS)
@pytest.mark.parametrize("thread_len", THREAD_LENS)
@pytest.mark.parametrize("spare", SPARES)
def test_canonical_rows_have_the_same_bits_everywhere(context_len: int, thread_len: int, spare: int) -> None:
    assert_same_bits_in_every_block(context_len, thread_len, spare)


def assert_same_bits_in_every_block(context_len: int, thread_len: int, spare: int) -> None:
    num_new = 17
    new = (rows(NUM_HEADS, num_new, 7), rows(NUM_KV_HEADS, num_new, 8), rows(NUM_KV_HEADS, num_new, 9))
    kernel = CanonicalKernel()
    singles = make_view(context_len, thread_len, thread_len + num_new + spare)
    one_by_one = []
    for index in range(num_new):
        one = tuple(part[:, :, index : index + 1] for part in new)
        one_by_one.append(run(kernel, singles, (one[0], one[1], one[2]), pad_to=MIN_ROWS))
        singles.thread_len += 1
    expected = torch.cat(one_by_one)
    for block in (2, 3, 4, 5, 8, 17):
        kv = make_view(context_len, thread_len, thread_len + num_new + spare)
        for start in range(0, num_new, block):
            part = tuple(each[:, :, start : start + block] for each in new)
            out = run(kernel, kv, (part[0], part[1], part[2]), pad_to=MIN_ROWS)
            assert torch.equal(out, expected[start : start + block]), (block, start)
            kv.thread_len += part[0].shape[2]


def test_canonical_ignores_what_a_rejected_draft_left_behind() -> None:
    new = (rows(NUM_HEADS, 3, 7), rows(NUM_KV_HEADS, 3, 8), rows(NUM_KV_HEADS, 3, 9))
    clean, dirty = make_view(90, 20, 64), make_view(90, 20, 64)
    for part in dirty.thread:
        part[:, :, 20:] = 1e4
    assert torch.equal(run(CanonicalKernel(), clean, new, pad_to=4), run(CanonicalKernel(), dirty, new, pad_to=4))


def test_deterministic_mode_is_refused_where_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="cpu only"):
        choose_kernel(torch.device("cuda"), deterministic=True)
