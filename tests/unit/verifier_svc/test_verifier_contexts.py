"""Who holds a context, and who goes when memory is short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from engine.device_thread import DeviceThread
from engine.kv_pool import KvPool, Slab
from engine.layout import KvLayout
from foveate.rpc.errors import NotFound, ResourceExhausted
from foveate.video import ContextTimings, VideoFacts
from verifier_svc.contexts import ContextFacts, ContextStore
from verifier_svc.memory import Memory, SlabLease

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)  # 512 bytes a token
PAGE_TOKENS = 8  # a slab of 4096 bytes
VIDEO = VideoFacts(1.0, 2, 2.0, (0.0, 0.5), 64, 48)


def facts(name: str, num_tokens: int = PAGE_TOKENS) -> ContextFacts:
    return ContextFacts(
        grid=(1, 2, 2),
        second_per_grid=1.0,
        context_id=name,
        num_tokens=num_tokens,
        visual_spans=((1, num_tokens - 2),),
        position_delta=0,
        video=VIDEO,
        timings=ContextTimings(1, 2, 3),
        kv_bytes=LAYOUT.slab_bytes(num_tokens),
        create_time_ns=0,
    )


class Bench:
    """A pool with room for four slabs of a page, and everything around it."""

    def __init__(self) -> None:
        self.pool = KvPool.create(LAYOUT, pool_bytes=5 * 4096, device=torch.device("cpu"), model_fingerprint="x")
        self.device = DeviceThread()
        self.contexts = ContextStore(free=lambda slab: (self.device.submit(self.pool.free, slab), None)[1])
        self.memory = Memory(self.pool, self.device, self.contexts)

    async def add(self, name: str) -> Slab:
        lease = SlabLease(self.pool)
        slab = await self.memory.take(lease, PAGE_TOKENS)
        lease.hand_over(slab)
        self.contexts.add(facts(name), slab)
        return slab

    async def num_slabs(self) -> int:
        return await self.device.run(lambda: self.pool.num_slabs)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.device.run(bench.pool.close)
    bench.device.close()


def names(bench: Bench) -> set[str]:
    return {one.facts.context_id for one in bench.contexts.newest_first()}


async def test_release_frees_at_once_or_with_the_last_answer(bench: Bench) -> None:
    await bench.add("a")
    first, second = bench.contexts.acquire("a"), bench.contexts.acquire("a")
    bench.contexts.release("a")
    assert bench.contexts.get("a") is None
    with pytest.raises(NotFound):
        bench.contexts.acquire("a")
    with pytest.raises(NotFound):
        bench.contexts.release("a")
    bench.contexts.give_back(first)
    assert (await bench.num_slabs(), bench.contexts.num_slabs) == (1, 1)
    bench.contexts.give_back(second)
    assert (await bench.num_slabs(), bench.contexts.num_slabs) == (0, 0)
    await bench.add("b")
    bench.contexts.release("b")
    assert await bench.num_slabs() == 0


async def test_the_longest_idle_goes_and_never_one_in_use(bench: Bench) -> None:
    for name in "abcd":
        await bench.add(name)
        await asyncio.sleep(0.002)
    used = bench.contexts.acquire("a")
    bench.contexts.get("b")  # asked for again: no longer the oldest
    await bench.add("e")
    assert names(bench) == set("abde")
    bench.contexts.give_back(used)
    await bench.add("f")
    assert names(bench) == set("abef")


async def test_full_of_contexts_in_use(bench: Bench) -> None:
    for name in "abcd":
        await bench.add(name)
        bench.contexts.acquire(name)
    with pytest.raises(ResourceExhausted) as caught:
        await bench.add("e")
    assert caught.value.reason == "POOL_FULL"
    assert caught.value.metadata == {"needed_bytes": "4096", "free_bytes": "0", "limit_bytes": "16384"}
    assert caught.value.retry_after_s is not None
    assert names(bench) == set("abcd")


async def test_nothing_is_evicted_in_vain(bench: Bench) -> None:
    for name in "abcd":
        await bench.add(name)
    bench.contexts.acquire("a")
    lease = SlabLease(bench.pool)
    with pytest.raises(ResourceExhausted) as caught:
        await bench.memory.take(lease, 4 * PAGE_TOKENS)
    assert caught.value.retry_after_s is not None
    with pytest.raises(ResourceExhausted) as caught:
        await bench.memory.take(lease, 100 * PAGE_TOKENS)
    assert caught.value.retry_after_s is None
    assert names(bench) == set("abcd")
    await bench.memory.take(lease, 3 * PAGE_TOKENS)
    assert names(bench) == {"a"}
    await bench.device.run(lease.free_all)
    assert await bench.num_slabs() == 1


async def test_a_cancelled_taker_loses_nothing(bench: Bench) -> None:
    lease = SlabLease(bench.pool)
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    blocked = bench.device.submit(lambda: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result())
    taking = asyncio.create_task(bench.memory.take(lease, PAGE_TOKENS))
    await asyncio.sleep(0.01)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    bench.device.submit(lease.free_all)
    gate.set()
    assert await bench.num_slabs() == 0
    assert blocked.done()
