"""The cold tier on a real redis-server: contexts come back bit for bit, in every form, to any verifier.

Cases C1 and C6 (nothing but what was written is ever used), C5 (a context larger than one value), C7 (tenants).
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from bench.redis_server import RedisServer
from foveate.context_source import ContextSource
from foveate.rpc.errors import NotFound, Unavailable
from foveate.store import keys
from foveate.v1 import contexts_pb2, verifier_pb2
from tests.fakes import until
from tests.redis_proxy import redis_proxy
from tests.unit.verifier_svc.cold_bench import CLIP, OTHER, answer, bits, cold_verifier, counters, is_written
from tests.unit.verifier_svc.serving import Served, config_for, serving
from verifier_svc.cold import forms
from verifier_svc.cold import tier as tier_module
from verifier_svc.memory import SlabLease
from verifier_svc.prefill import Prefilled, Prefiller
from verifier_svc.publishing import Publishing

KV, EMBEDDINGS, MEDIA = ContextSource.COLD_KV, ContextSource.COLD_EMBEDDINGS, ContextSource.MEDIA


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    with redis_server.client() as client:
        client.flushall()
    return redis_server


@pytest.fixture
def store(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
async def first(checkpoint: Path, server: RedisServer) -> AsyncIterator[Served]:
    async with cold_verifier(checkpoint, server.settings()) as served:
        yield served


@pytest.fixture
async def second(checkpoint: Path, server: RedisServer) -> AsyncIterator[Served]:
    async with cold_verifier(checkpoint, server.settings()) as served:
        yield served


def chunk_keys(store: redis.Redis, context: str, form: str) -> list[bytes]:
    pattern = f"foveate:{{{context.removeprefix('contexts/')}}}:{form}:[0-9]*:*"
    return sorted(store.scan_iter(pattern, count=1000))


def drop(store: redis.Redis, context: str, *names: str) -> None:
    for form in names:
        store.delete(keys.manifest(context.removeprefix("contexts/"), form))


async def test_a_verifier_that_ends_hands_its_contexts_over(
    checkpoint: Path, server: RedisServer, second: Served, store: redis.Redis
) -> None:
    async with cold_verifier(checkpoint, server.settings()) as ending:
        context = await ending.prefill(CLIP, fps=4)
        expected, _ = await answer(ending, context.name)
        assert ending.verifier.redis is not None
        await is_written(ending)
        drop(store, context.name, "kv")
        held = ending.verifier.contexts.get(context.name.removeprefix("contexts/"))
        assert held is not None
        held.cold_bytes.clear()
        publisher = ending.verifier.redis.publisher
        async with publisher._one_at_a_time:  # others are being written: its turn comes when the verifier ends
            await publisher.announce(held, held.fencing_token, Publishing(None, None))
            await asyncio.sleep(0.05)
            assert publisher.num_running == 1
    tokens, opened = await answer(second, context.name)
    assert (tokens, opened.fetch.source) == (expected, KV)


@pytest.mark.parametrize(
    ("lost", "source", "counter"),
    [
        ((), KV, "restored_kv"),
        (("kv",), EMBEDDINGS, "restored_embeddings"),
        (("kv", "embeddings"), MEDIA, "restored_media"),
    ],
)
async def test_another_verifier_brings_a_context_back_bit_for_bit(
    first: Served, second: Served, store: redis.Redis, lost: tuple[str, ...], source: ContextSource, counter: str
) -> None:
    context = await first.prefill(CLIP, fps=4)
    expected, opened = await answer(first, context.name)
    assert opened.fetch.source == ContextSource.POOL
    await is_written(first)
    drop(store, context.name, *lost)
    tokens, opened = await answer(second, context.name)
    assert tokens == expected
    assert torch.equal(await bits(second, context.name), await bits(first, context.name))
    assert opened.fetch.source == source
    assert opened.fetch.took_ms > 0
    assert opened.fetch.costs[0].source == source
    assert {cost.source for cost in opened.fetch.costs} == {KV, EMBEDDINGS, MEDIA} - {
        {"kv": KV, "embeddings": EMBEDDINGS}[name] for name in lost
    }
    assert counters(second)[counter] == 1
    (held,) = await second.verifier.listed_contexts("", include_cold=False, context_id=None)
    assert (held.num_visual_tokens, held.video, held.timings) == (
        context.num_visual_tokens,
        context.video,
        held.timings,
    )
    if source is KV:
        assert held.create_time == context.create_time
        assert held.timings == context.timings


async def test_a_hit_says_what_the_other_ways_would_have_cost(first: Served) -> None:
    context = await first.prefill(CLIP, fps=4)
    await is_written(first)
    _, opened = await answer(first, context.name)
    costs = {cost.source: cost for cost in opened.fetch.costs}
    assert set(costs) == {ContextSource.POOL, KV, EMBEDDINGS, MEDIA}
    assert costs[ContextSource.POOL].estimated_ms == 0
    made_ms = context.timings.decode_ms + context.timings.encode_ms + context.timings.prefill_ms
    assert costs[MEDIA].estimated_ms >= made_ms
    assert context.kv_bytes - 2 * 4096 < costs[KV].num_bytes <= context.kv_bytes
    again = await first.prefill(CLIP, fps=4)
    assert again.reused
    assert again.num_hits >= 2
    tiers = {tier.tier: tier.num_bytes for tier in again.tiers}
    assert set(tiers) == {ContextSource.POOL, KV, EMBEDDINGS, MEDIA}
    assert tiers[MEDIA] == len(CLIP)


async def test_a_creation_reads_the_keys_and_values_when_that_is_cheaper(
    first: Served, second: Served, store: redis.Redis
) -> None:
    context = await first.prefill(CLIP, fps=4)
    await is_written(first)
    again = await second.prefill(CLIP, fps=4)
    assert again.name == context.name
    assert again.fetch.source == KV
    assert again.reused
    assert torch.equal(await bits(second, context.name), await bits(first, context.name))


async def test_named_tensors_of_a_context_come_back(
    first: Served, second: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill_text = Prefiller.prefill_text
    states = torch.randn(7, 5, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)

    async def with_states(self: Prefiller, encoded: Any, identity: Any, lease: SlabLease, board: Any) -> Prefilled:
        made = await prefill_text(self, encoded, identity, lease, board)
        slab = await self._memory.take_tensor(lease, (7, 5), torch.bfloat16)
        self._parts.pool.tensor_view(slab).copy_(states)
        return Prefilled(made.facts, made.slab, {**made.tensors, "states": slab})

    monkeypatch.setattr(Prefiller, "prefill_text", with_states)
    context = await first.prefill(CLIP, fps=4)
    monkeypatch.undo()
    await is_written(first)
    _, opened = await answer(second, context.name)
    assert opened.fetch.source == KV
    held = second.verifier.contexts.get(context.name.removeprefix("contexts/"))
    assert held is not None
    assert torch.equal(second.verifier.parts.pool.tensor_view(held.tensors["states"]), states)
    assert second.verifier.contexts.num_slabs == 3


async def test_a_context_of_many_chunks(
    first: Served, second: Served, store: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "CHUNK_BYTES", 4096)
    context = await first.prefill(CLIP, fps=4)
    await is_written(first)
    found = chunk_keys(store, context.name, "kv")
    assert len(found) > 10
    assert max(store.strlen(key) for key in found) <= 4096 + 80
    expected, _ = await answer(first, context.name)
    tokens, opened = await answer(second, context.name)
    assert (tokens, opened.fetch.source) == (expected, KV)
    assert torch.equal(await bits(second, context.name), await bits(first, context.name))


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def flipped_header(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


Damage = Callable[[redis.Redis, list[bytes], list[bytes]], object]
DAMAGES: dict[str, Damage] = {
    "deleted": lambda store, mine, other: store.delete(mine[0]),
    "flipped": lambda store, mine, other: store.set(mine[0], flipped(_get(store, mine[0]))),
    "flipped header": lambda store, mine, other: store.set(mine[0], flipped_header(_get(store, mine[0]))),
    "truncated": lambda store, mine, other: store.set(mine[0], _get(store, mine[0])[:-7]),
    "too long": lambda store, mine, other: store.append(mine[0], "x"),
    "empty": lambda store, mine, other: store.set(mine[0], b""),
    "foreign": lambda store, mine, other: store.set(mine[0], _get(store, other[0])),
    "another type": lambda store, mine, other: (store.delete(mine[0]), store.rpush(mine[0], "x")),
    "a pickle": lambda store, mine, other: store.set(mine[0], pickle.dumps({"a": 1})),
    "all deleted": lambda store, mine, other: store.delete(*mine),
}


def _get(store: redis.Redis, key: bytes) -> bytes:
    data = store.get(key)
    assert isinstance(data, bytes)
    return data


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("has_other_forms", [True, False])
async def test_a_chunk_that_lies_is_noticed(
    first: Served, second: Served, store: redis.Redis, damage: str, has_other_forms: bool
) -> None:
    context, other = await first.prefill(CLIP, fps=4), await first.prefill(OTHER, fps=4)
    expected, _ = await answer(first, context.name)
    await is_written(first)
    if not has_other_forms:
        drop(store, context.name, "embeddings", "media")
    mine, others = (chunk_keys(store, one.name, "kv") for one in (context, other))
    DAMAGES[damage](store, mine, others)
    if has_other_forms:
        tokens, opened = await answer(second, context.name)
        assert tokens == expected
        assert opened.fetch.source in (EMBEDDINGS, MEDIA)
        assert torch.equal(await bits(second, context.name), await bits(first, context.name))
    else:
        with pytest.raises(NotFound) as caught:
            await answer(second, context.name)
        assert caught.value.reason == "CONTEXT_NOT_HELD"
    told = counters(second)
    assert told.get("cold_missing", 0) + told.get("cold_corrupt", 0) == 1
    assert ("cold_missing" in told) == ("deleted" in damage)
    await until_quiet(second)
    in_pool = await second.verifier.device.run(lambda: second.verifier.parts.pool.num_slabs)
    assert in_pool == second.verifier.contexts.num_slabs
    # The next creation makes it anew, and it is whole again for a third.
    again = await second.prefill(CLIP, fps=4)
    assert again.name == context.name
    tokens, _ = await answer(second, context.name)
    assert tokens == expected


def _foreign_manifest(store: redis.Redis, mine: str, other: str) -> bytes:
    return _get(store, other.encode())


MANIFESTS: dict[str, Callable[[redis.Redis, str, str], bytes]] = {
    "flipped": lambda store, mine, other: flipped(_get(store, mine.encode())),
    "truncated": lambda store, mine, other: _get(store, mine.encode())[:-40],
    "foreign": _foreign_manifest,
    "empty": lambda store, mine, other: b"",
    "a pickle": lambda store, mine, other: pickle.dumps([1, 2, 3]),
    "noise": lambda store, mine, other: bytes(range(256)) * 4,
}


@pytest.mark.parametrize("lie", MANIFESTS)
async def test_a_manifest_that_lies_is_refused(first: Served, second: Served, store: redis.Redis, lie: str) -> None:
    context, other = await first.prefill(CLIP, fps=4), await first.prefill(OTHER, fps=4)
    await is_written(first)
    names = [keys.manifest(one.name.removeprefix("contexts/"), "kv") for one in (context, other)]
    data = MANIFESTS[lie](store, *names)
    store.set(names[0], data)
    expected, _ = await answer(first, context.name)
    tokens, opened = await answer(second, context.name)
    assert tokens == expected
    assert opened.fetch.source in (EMBEDDINGS, MEDIA)
    assert counters(second)["cold_corrupt"] == 1


async def test_a_half_written_context_is_none(first: Served, second: Served, store: redis.Redis) -> None:
    context = await first.prefill(CLIP, fps=4)
    await is_written(first)
    drop(store, context.name, "kv", "embeddings", "media")  # as a writer that died before its manifests leaves it
    assert chunk_keys(store, context.name, "kv")
    with pytest.raises(NotFound):
        await answer(second, context.name)
    assert counters(second)["cold_missed"] == 1


async def test_tenants_do_not_share(first: Served, second: Served) -> None:
    def spec(tenant: str) -> list[verifier_pb2.PrefillRequest]:
        source = contexts_pb2.ContextSpec(upload=contexts_pb2.Upload(total_bytes=len(CLIP)))
        source.sampling.fps = 4
        chunk = contexts_pb2.MediaChunk(write_offset=0, data=CLIP)
        return [verifier_pb2.PrefillRequest(spec=source, tenant=tenant), verifier_pb2.PrefillRequest(chunk=chunk)]

    ours = (await first.prefill_events(spec("us")))[-1].context
    theirs = (await first.prefill_events(spec("them")))[-1].context
    assert ours.name != theirs.name
    assert not theirs.reused
    await is_written(first)
    await answer(first, ours.name, tenant="us")
    for served in (first, second):  # in the pool, and in the cold tier only
        for tenant in ("them", "", "us "):
            with pytest.raises(NotFound):
                await answer(served, ours.name, tenant=tenant)
    await answer(second, ours.name, tenant="us")
    for tenant, name in (("us", ours.name), ("them", theirs.name)):
        request = verifier_pb2.ListHeldContextsRequest(tenant=tenant, include_cold=True)
        assert [one.name for one in (await second.stub.ListHeldContexts(request)).contexts] == [name]
    assert (await second.stub.ListHeldContexts(verifier_pb2.ListHeldContextsRequest(include_cold=True))).contexts == []


async def test_without_redis_nothing_is_brought_back(checkpoint: Path, first: Served) -> None:
    context = await first.prefill(CLIP, fps=4)
    async with serving(config_for(checkpoint, deterministic=True)) as plain:
        with pytest.raises(NotFound):
            await answer(plain, context.name)
        again = await plain.prefill(CLIP, fps=4)
        assert again.name == context.name
        assert [tier.tier for tier in again.tiers] == [ContextSource.POOL]


async def test_redis_that_is_gone_costs_one_short_wait_a_period(
    checkpoint: Path, first: Served, server: RedisServer
) -> None:
    context = await first.prefill(CLIP, fps=4)
    expected, _ = await answer(first, context.name)
    await is_written(first)
    async with redis_proxy(server.port) as proxy:
        settings = RedisServer.settings(proxy, timeout_s=0.05, breaker_s=30.0)  # type: ignore[arg-type]
        proxy.is_deaf = True
        async with cold_verifier(checkpoint, settings) as deaf:
            await asyncio.sleep(0.2)  # the heartbeat found out
            for _ in range(3):
                before_s = time.perf_counter()
                with pytest.raises(Unavailable) as caught:
                    await answer(deaf, context.name)
                assert time.perf_counter() - before_s < 0.05 + 0.05
                assert (caught.value.reason, caught.value.retry_after_s) == ("COLD_TIER_UNREACHABLE", 1.0)
            again = await deaf.prefill(CLIP, fps=4)
            assert again.fetch.source == MEDIA
            assert (await answer(deaf, context.name))[0] == expected
            assert counters(deaf)["breaker_opened"] == 1
            assert counters(deaf)["redis_failures"] == 1


async def test_redis_gone_at_start_during_and_back_again(checkpoint: Path, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    async with cold_verifier(checkpoint, server.settings(timeout_s=1.0)) as served:
        context = await served.prefill(CLIP, fps=4)
        expected, _ = await answer(served, context.name)
        await served.stub.ReleaseContext(verifier_pb2.ReleaseContextRequest(name=context.name))
        with server:
            await asyncio.sleep(0.3)
            await served.prefill(CLIP, fps=4)
            await is_written(served)
            assert counters(served)["cold_published_kv"] == 1
            server.kill()
            assert (await answer(served, context.name))[0] == expected  # in the pool: needs no Redis
            served.verifier.contexts.release(context.name.removeprefix("contexts/"))
            with pytest.raises(Unavailable):
                await answer(served, context.name)
            server.start()
            await asyncio.sleep(0.3)
            with pytest.raises(NotFound):  # what was in it is gone with it
                await answer(served, context.name)
            again = await served.prefill(CLIP, fps=4)
            await is_written(served)
            served.verifier.contexts.release(again.name.removeprefix("contexts/"))
            tokens, opened = await answer(served, context.name)
            assert (tokens, opened.fetch.source) == (expected, KV)


async def test_a_slow_redis_and_a_cut_connection(
    checkpoint: Path, first: Served, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = await first.prefill(CLIP, fps=4)
    expected, _ = await answer(first, context.name)
    await is_written(first)
    async with redis_proxy(server.port) as proxy:
        settings = RedisServer.settings(proxy)  # type: ignore[arg-type]
        async with cold_verifier(checkpoint, settings, cold={"num_connections": 1}) as served:
            assert served.verifier.redis is not None
            copies = await served.verifier.redis.cold.find(context.name.removeprefix("contexts/"), "")
            proxy.cut_after_bytes = copies[KV].num_bytes // 2  # in the middle of the keys and values
            tokens, opened = await answer(served, context.name)
            assert tokens == expected
            assert opened.fetch.source in (EMBEDDINGS, MEDIA)
            assert counters(served)["cold_unreachable"] == 1
            served.verifier.contexts.release(context.name.removeprefix("contexts/"))
            monkeypatch.setattr(tier_module, "_TRANSFER_FLOOR_S", 0.3)
            copies = await served.verifier.redis.cold.find(context.name.removeprefix("contexts/"), "")
            proxy.delay_s = 0.5  # every transfer is given up, every small command is answered
            with pytest.raises(Unavailable) as caught:
                await answer(served, context.name)
            assert caught.value.reason == "COLD_TIER_UNREACHABLE"
            proxy.delay_s = 0.0
            monkeypatch.undo()
            tokens, opened = await answer(served, context.name)
            assert (tokens, opened.fetch.source) == (expected, KV)


async def test_a_cancelled_read_leaves_its_reply_to_nobody(
    checkpoint: Path, first: Served, server: RedisServer
) -> None:
    context, other = await first.prefill(CLIP, fps=4), await first.prefill(OTHER, fps=4)
    expected = [(await answer(first, one.name))[0] for one in (context, other)]
    await is_written(first)
    async with (
        redis_proxy(server.port) as proxy,
        cold_verifier(checkpoint, RedisServer.settings(proxy)) as served,  # type: ignore[arg-type]
    ):
        for delay_s in (0.01, 0.03, 0.1):
            proxy.delay_s = 0.05
            for name in (context.name, other.name):
                opening = asyncio.create_task(answer(served, name))
                await asyncio.sleep(delay_s)
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
            proxy.delay_s = 0.0
            await until_quiet(served)
            assert await served.used_bytes() == sum(
                held.facts.kv_bytes for held in served.verifier.contexts.newest_first()
            )
            for name, tokens in zip((other.name, context.name), reversed(expected), strict=True):
                assert (await answer(served, name))[0] == tokens
                served.verifier.contexts.release(name.removeprefix("contexts/"))


async def until_quiet(served: Served) -> None:
    await until(lambda: served.verifier.num_prefills == 0 and served.verifier.num_sequences == 0, within_s=20)


async def test_maxmemory(checkpoint: Path, tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory-policy", "noeviction") as small:
        async with cold_verifier(checkpoint, small.settings()) as served:
            with small.client() as client:
                used = int(client.info("memory")["used_memory"])
                client.config_set("maxmemory", used + len(CLIP) + 100_000)
            context = await served.prefill(CLIP, fps=4)
            await is_written(served)
            told = counters(served)
            assert told["cold_full"] >= 1
            assert (await answer(served, context.name))[1].fetch.source == ContextSource.POOL
            with small.client() as client:
                assert not list(client.scan_iter("foveate:*:kv:*"))  # nothing half-written is left


async def test_evicted_data_with_surviving_metadata(first: Served, second: Served, store: redis.Redis) -> None:
    context = await first.prefill(CLIP, fps=4)
    await is_written(first)
    for form in ("kv", "embeddings", "media"):
        store.delete(*chunk_keys(store, context.name, form))
    with pytest.raises(NotFound):
        await answer(second, context.name)
    assert counters(second)["cold_missing"] == 3
    assert not list(store.scan_iter("foveate:*:manifest"))


async def test_the_cap_evicts_the_oldest_and_never_what_is_pinned(
    checkpoint: Path, server: RedisServer, store: redis.Redis
) -> None:
    async with cold_verifier(checkpoint, server.settings()) as served:
        one = await served.prefill(CLIP, fps=4)
        await is_written(served)
    size = sum(store.strlen(key) for form in ("kv", "embeddings", "media") for key in chunk_keys(store, one.name, form))
    store.flushall()
    async with cold_verifier(checkpoint, server.settings(), cold={"max_bytes": int(size * 2.2)}) as served:
        names = []
        for index, data in enumerate((CLIP, OTHER, CLIP, OTHER)):
            made = await served.prefill(data, fps=4 if index < 2 else 2)
            names.append(made.name)
            await is_written(served)
            if index == 0:
                touch = verifier_pb2.TouchHeldContextRequest(name=made.name, pinned=True)
                assert (await served.stub.TouchHeldContext(touch)).context.pinned
        kept = [name for name in names if chunk_keys(store, name, "kv")]
        assert names[0] in kept
        assert names[-1] in kept
        assert names[1] not in kept
        assert store.ttl(chunk_keys(store, names[0], "kv")[0]) == -1
        assert store.ttl(chunk_keys(store, names[-1], "kv")[0]) > 1000
        assert counters(served)["cold_evicted"] >= 1


async def test_release_deletes_everywhere_and_touch_pins(first: Served, second: Served, store: redis.Redis) -> None:
    context = await first.prefill(CLIP, fps=4)
    await is_written(first)
    touched = await second.stub.TouchHeldContext(verifier_pb2.TouchHeldContextRequest(name=context.name, pinned=True))
    assert touched.context.state == contexts_pb2.CONTEXT_STATE_COLD
    assert touched.context.pinned
    assert not touched.context.HasField("expire_time")
    await answer(second, context.name)
    (held,) = await second.verifier.listed_contexts("", include_cold=True, context_id=None)
    assert (held.state, held.pinned) == (contexts_pb2.CONTEXT_STATE_READY, True)
    await second.stub.ReleaseContext(verifier_pb2.ReleaseContextRequest(name=context.name))
    assert not list(store.scan_iter("foveate:*:kv:*"))
    assert not list(store.scan_iter("foveate:*:record"))
    with pytest.raises(NotFound):
        await answer(second, context.name)
    with pytest.raises(NotFound):
        await second.verifier.release_context(context.name.removeprefix("contexts/"), "")
