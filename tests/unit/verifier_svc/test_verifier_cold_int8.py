"""Cold copies in eight bits: smaller, close, and never taken for exact ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
import torch

from bench.redis_server import RedisServer
from foveate.context_source import ContextSource
from foveate.v1 import verifier_pb2
from tests.unit.verifier_svc.cold_bench import CLIP, answer, bits, cold_verifier, counters, is_written
from tests.unit.verifier_svc.serving import Served, config_for, serving, upload
from verifier_svc.cold.int8 import from_int8, to_int8

INT8 = {"int8": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as started:
        yield started


@pytest.fixture
def store(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
async def pair(checkpoint: Path, server: RedisServer) -> AsyncIterator[tuple[Served, Served]]:
    settings = server.settings()
    async with (
        cold_verifier(checkpoint, settings, cold=INT8) as first,
        cold_verifier(checkpoint, settings, cold=INT8) as second,
    ):
        yield first, second


def values(raw: torch.Tensor) -> torch.Tensor:
    return raw.view(torch.float32)


def manifests(store: redis.Redis, context: str) -> set[str]:
    keys = store.scan_iter(f"foveate:{{{context.removeprefix('contexts/')}}}:*:manifest", count=1000)
    return {key.decode().split(":")[-2] for key in keys}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_error_is_half_a_step_at_most(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = (torch.randn(2, 3, 2, 5, 32, generator=generator) * torch.logspace(-6, 6, 5)[:, None]).to(dtype)
    exact[0, 0, 0, 0] = 0
    integers, scales = to_int8(exact)
    assert (integers.dtype, integers.shape, scales.shape) == (torch.int8, exact.shape, (2, 3, 2, 5, 1))
    back = torch.empty(exact.shape)
    from_int8(integers, scales, back)
    assert torch.equal(back[0, 0, 0, 0], torch.zeros(32))
    assert ((back - exact.float()).abs() <= scales * 0.5001).all()
    num_bytes = integers.numel() + scales.numel() * 4
    assert num_bytes / (exact.numel() * 4) < 0.29  # with heads of 32; 0.27 with 64, 0.26 with 128


async def test_a_context_from_eight_bits_is_close_and_says_so(pair: tuple[Served, Served], store: redis.Redis) -> None:
    first, second = pair
    made = await first.prefill(CLIP, fps=4)
    assert not made.lossy
    tokens, opened = await answer(first, made.name)
    assert not opened.lossy_context
    await is_written(first)
    assert manifests(store, made.name) == {"kv8", "embeddings", "media"}
    restored, opened = await answer(second, made.name)
    assert (opened.fetch.source, opened.lossy_context) == (ContextSource.COLD_KV_INT8, True)
    assert len(restored) == len(tokens)
    _, opened = await answer(second, made.name)  # from the pool, and still what it is
    assert (opened.fetch.source, opened.lossy_context) == (ContextSource.POOL, True)
    exact, lossy = values(await bits(first, made.name)), values(await bits(second, made.name))
    assert not torch.equal(lossy, exact)
    assert (lossy - exact).abs().max() <= exact.abs().max() / 127
    (told,) = await second.verifier.listed_contexts("", include_cold=True, context_id=None)
    assert told.lossy
    assert {tier.tier for tier in told.tiers} >= {ContextSource.POOL, ContextSource.COLD_KV_INT8}
    assert second.verifier.redis is not None
    copies = await second.verifier.redis.cold.find(made.name.removeprefix("contexts/"), "")
    sizes = {one.name: one.num_bytes for one in copies[ContextSource.COLD_KV_INT8].manifest.tensors}
    head_dim = first.verifier.parts.pool.layout.head_dim
    assert (sizes["kv_int8"] + sizes["kv_scales"]) * 4 * head_dim == exact.nbytes * (head_dim + 4)
    assert counters(second)["restored_kv8"] == 1


async def test_what_is_not_exact_is_never_written_announced_or_created(
    pair: tuple[Served, Served], store: redis.Redis
) -> None:
    first, second = pair
    made = await first.prefill(CLIP, fps=4)
    tokens, _ = await answer(first, made.name)
    await is_written(first)
    await answer(second, made.name)
    await is_written(second)
    context_id = made.name.removeprefix("contexts/")
    await second.verifier.touch_context(context_id, "", pinned=None)
    assert manifests(store, made.name) == {"kv8", "embeddings", "media"}
    pools = [served.verifier.parts.pool.handle.pool_id for served in pair]
    assert store.hkeys(f"foveate:{{{context_id}}}:holders") == [pools[0].encode()]
    # Whoever has the video gets the exact one, here too.
    spec, *chunks = upload(CLIP, fps=4)
    again = (await second.prefill_events([spec, *chunks]))[-1].context
    assert (again.name, again.lossy, again.fetch.source != ContextSource.COLD_KV_INT8) == (made.name, False, True)
    assert torch.equal(await bits(second, made.name), await bits(first, made.name))
    restored, opened = await answer(second, made.name)
    assert (restored, opened.lossy_context) == (tokens, False)


async def test_only_who_allows_it_reads_eight_bits(
    pair: tuple[Served, Served], checkpoint: Path, server: RedisServer, store: redis.Redis
) -> None:
    first, _ = pair
    made = await first.prefill(CLIP, fps=4)
    tokens, _ = await answer(first, made.name)
    await is_written(first)
    async with cold_verifier(checkpoint, server.settings()) as strict:
        restored, opened = await answer(strict, made.name)
        assert (restored, opened.lossy_context) == (tokens, False)
        assert {cost.source for cost in opened.fetch.costs} == {ContextSource.COLD_EMBEDDINGS, ContextSource.MEDIA}
        await is_written(strict)
        assert manifests(store, made.name) == {"kv", "kv8", "embeddings", "media"}
        await strict.stub.ReleaseContext(verifier_pb2.ReleaseContextRequest(name=made.name))
    assert manifests(store, made.name) == set()
    async with serving(config_for(checkpoint, deterministic=True)) as alone:
        assert (await alone.prefill(CLIP, fps=4)).name == made.name
