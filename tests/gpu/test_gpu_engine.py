"""Kernels, runner and noise on a GPU against the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention import KvView
from engine.attention.base import Step
from engine.attention.choose import choose_kernel
from engine.loading import LoadedModel, load_model
from engine.positions import text_positions
from engine.runner import TextRunner
from engine.sampling import Sampling, choose, uniform

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64


def attention(kv: KvView, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    kernel = choose_kernel(query.device, deterministic=False)
    num_new = query.shape[2]
    plan = kernel.plan(kv, num_new, num_new, num_heads=NUM_HEADS, scaling=HEAD_DIM**-0.5)
    return Step(kv, num_new, plan, None).attend(0, query, key, value)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2), ("float16", 4e-3)])
@pytest.mark.parametrize("num_new", [1, 6, 17, 300])
@pytest.mark.parametrize(("context_len", "thread_len"), [(0, 0), (0, 70), (2500, 33), (130, 2100)])
def test_attention_equals_the_cpu(
    cuda: torch.device, dtype: str, tolerance: float, num_new: int, context_len: int, thread_len: int
) -> None:
    generator = torch.Generator().manual_seed(0)

    def rows(num_heads: int, num_rows: int) -> Tensor:
        return torch.randn(1, num_heads, num_rows, HEAD_DIM, generator=generator)

    context = (rows(NUM_KV_HEADS, context_len), rows(NUM_KV_HEADS, context_len)) if context_len else None
    thread = rows(NUM_KV_HEADS, thread_len + num_new), rows(NUM_KV_HEADS, thread_len + num_new)
    new = rows(NUM_HEADS, num_new), rows(NUM_KV_HEADS, num_new), rows(NUM_KV_HEADS, num_new)
    wanted = getattr(torch, dtype)

    def moved(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(part.to(cuda, wanted) for part in parts)

    expected = attention(KvView(context, thread, thread_len), *new)
    there = moved(context) if context else None
    view = KvView((there[0], there[1]) if there else None, (moved(thread)[0], moved(thread)[1]), thread_len)
    query, key, value = moved(new)
    out = attention(view, query, key, value)
    assert out.device.type == "cuda"
    torch.testing.assert_close(out.float().cpu(), expected, atol=tolerance, rtol=tolerance)


def view_of(loaded: LoadedModel, capacity: int) -> KvView:
    layout = loaded.layout
    shape = (layout.num_layers, layout.num_kv_heads, capacity, layout.head_dim)
    zeros = torch.zeros(shape, dtype=layout.dtype, device=loaded.device)
    return KvView(None, (zeros, zeros.clone()), 0)


def test_the_runner_equals_the_cpu(checkpoint: Path, on_gpu: LoadedModel) -> None:
    on_cpu = load_model(checkpoint)
    token_ids = torch.randint(8, 260, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = []
    for loaded in (on_cpu, on_gpu):
        runner, kv = TextRunner(loaded), view_of(loaded, 100)
        out = [runner.logits(runner.forward(token_ids=token_ids[:80], positions=text_positions(0, 80), kv=kv))]
        kv.thread_len = 80
        for start in (80, 86, 87, 88):
            part = token_ids[start : start + 6] if start == 80 else token_ids[start : start + 1]
            where = text_positions(start, len(part))
            out.append(runner.logits(runner.forward(token_ids=part, positions=where, kv=kv)))
            kv.thread_len += len(part)
        rows.append(torch.cat(out).cpu())
    shown = torch.isfinite(rows[0])
    torch.testing.assert_close(rows[1][shown], rows[0][shown], atol=2e-3, rtol=1e-3)


def test_noise_has_the_same_bits_on_every_device(cuda: torch.device) -> None:
    token_ids = torch.arange(152_064)
    here = uniform(2**63 + 7, [5, 6], token_ids)
    assert torch.equal(uniform(2**63 + 7, [5, 6], token_ids.to(cuda)).cpu(), here)
    logits = torch.randn(8, 152_064, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=3)
    assert choose(logits.to(cuda), 100, sampling) == choose(logits, 100, sampling)
