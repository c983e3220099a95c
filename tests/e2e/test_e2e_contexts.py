"""Contexts over real processes: one prefill for a hundred askers, killed verifiers, restarted gateways, one Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench.redis_server import RedisServer
from foveate.client import Answer, AskOptions, AsyncClient, Context, ContextSource, ContextState, DraftMode
from foveate.rpc.errors import NotFound
from foveate.v1 import verifier_pb2, verifier_pb2_grpc
from tests.e2e.fleet import Fleet, running
from tests.e2e.support import FPS, long_answer, wait_until

NUM_ASKERS = 100
QUESTION = "Describe the video."
LONG = AskOptions(ignore_eos=True, max_tokens=200)  # an answer that runs still when its verifier is lost


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def fleet(
    model: Path, folder: Path, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with running(Fleet(model, folder, redis_server, tmp_path_factory.mktemp("services"))) as started:
        yield started


def counter(fleet: Fleet, name: str) -> int:
    """Sum over the verifiers, as the first gateway sees them."""
    with fleet.client() as client:
        return client.server_info().context_counters.get(name, 0)


def written(fleet: Fleet, context: Context) -> bool:
    """Whether the keys and values are in the cold tier."""
    with fleet.client() as client:
        return "cold_kv" in client.get_context(context).tiers


@pytest.mark.slow  # of two verifiers alone: tests/unit/verifier_svc/test_verifier_directory.py
def test_a_hundred_first_askers_cause_one_prefill(fleet: Fleet, folder: Path) -> None:
    data = (folder / "long.mp4").read_bytes()

    async def ask_first(client: AsyncClient, index: int) -> tuple[Context, Answer]:
        if index % 4 < 2:
            context = await client.create_context_from_bytes(data, fps=FPS)
        else:
            context = await client.create_context(server_path="long.mp4", fps=FPS)
        return context, await client.ask(context, QUESTION, max_tokens=4, draft=DraftMode.OFF)

    async def ask_all() -> list[tuple[Context, Answer]]:
        one, two = (AsyncClient(gateway.address, timeout_s=300) for gateway in fleet.gateways)
        async with one, two:
            return await asyncio.gather(*(ask_first((one, two)[index % 2], index) for index in range(NUM_ASKERS)))

    before = counter(fleet, "prefilled")
    asked = asyncio.run(ask_all())
    assert len({context.name for context, _ in asked}) == 1
    assert len({answer.token_ids for _, answer in asked}) == 1
    assert counter(fleet, "prefilled") - before == 1


def test_an_answer_outlives_its_killed_verifier(fleet: Fleet, video: Path) -> None:
    with fleet.client() as client:
        context = client.create_context(video, fps=FPS)
        plain, options = long_answer(client, context)
        greedy = client.ask(context, QUESTION, draft=DraftMode.OFF, **LONG)
        assert wait_until(lambda: written(fleet, context), 60)
        for expected, asked in ((plain, options), (greedy, LONG)):
            held = {service.name: holds(service.address, context) for service in fleet.verifiers}
            with client.stream(context, QUESTION, **asked) as stream:
                next(stream)
                next(stream)
                victim = next(service for service in fleet.verifiers if num_sequences(service.address))
                assert held[victim.name]
                victim.kill()
                answer = stream.result
            assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
            victim.start()
            victim.wait()
            fleet.wait_ready()
        after = client.ask(context, QUESTION, **LONG)
        assert after.token_ids == greedy.token_ids
    assert counter(fleet, "gateway_verifiers_lost") >= 2


def test_an_answer_leaves_a_verifier_that_hangs(fleet: Fleet, video: Path) -> None:
    with fleet.client() as client:
        context = client.create_context(video, fps=FPS)
        expected = client.ask(context, QUESTION, draft=DraftMode.OFF, **LONG)
        with client.stream(context, QUESTION, draft=DraftMode.OFF, **LONG) as stream:
            next(stream)
            victim = next(service for service in fleet.verifiers if num_sequences(service.address))
            with victim.hung():
                began_s = time.monotonic()
                answer = stream.result
                took_s = time.monotonic() - began_s
        assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
        assert took_s < 20  # some 4 s on an idle machine; a connection's keepalive would take 40
        fleet.wait_ready()
        assert wait_until(lambda: num_sequences(victim.address) == 0, 30)


def test_a_conversation_goes_on_after_its_gateway_and_its_verifiers_were_restarted(fleet: Fleet, folder: Path) -> None:
    with fleet.client(0) as client:
        context = client.create_context(folder / "other.mp4", fps=FPS)
        first = client.ask(context, QUESTION, conversation="e2e-turns")
        assert first.num_conversation_turns == 1
        expected = client.ask(context, "What else?", history=first.turns)
        assert wait_until(lambda: written(fleet, context), 60)
    fleet.gateways[0].kill()
    with fleet.client(1) as client:
        second = client.ask("", "What else?", conversation="e2e-turns")
        assert second.token_ids == expected.token_ids
        assert second.num_cached_tokens > first.num_cached_tokens  # the first turn's KV was kept
        regenerated = client.ask("", "What else?", conversation="e2e-turns", keep_turns=1)
        assert regenerated.token_ids == expected.token_ids
        assert regenerated.num_conversation_turns == 2
    for service in fleet.verifiers:
        service.kill()
    for service in (*fleet.verifiers, fleet.gateways[0]):
        service.start()
    for service in (*fleet.verifiers, fleet.gateways[0]):
        service.wait()
    fleet.wait_ready()
    with fleet.client(0) as client:
        assert client.get_context(context).state is ContextState.COLD
        again = client.ask("", "What else?", conversation="e2e-turns", keep_turns=1)
        assert again.token_ids == expected.token_ids
        assert again.fetch is not None
        assert again.fetch.source in (ContextSource.COLD_KV, ContextSource.COLD_EMBEDDINGS, ContextSource.MEDIA)
        assert {cost.source for cost in again.fetch.costs} == {
            ContextSource.COLD_KV,
            ContextSource.COLD_EMBEDDINGS,
            ContextSource.MEDIA,
        }
        assert client.get_context(context).state is ContextState.READY


def test_a_deleted_context_is_gone_everywhere(fleet: Fleet, folder: Path) -> None:
    with fleet.client(0) as client, fleet.client(1) as other:
        context = client.create_context(folder / "other.mp4", fps=2.0)
        assert other.get_context(context).name == context.name
        assert wait_until(lambda: written(fleet, context), 60)
        other.delete_context(context)
        for one in (client, other):
            with pytest.raises(NotFound):
                one.get_context(context)
            with pytest.raises(NotFound):
                one.ask(context, QUESTION)
            assert context.name not in [held.name for held in one.list_contexts()]


def test_redis_that_comes_and_goes_costs_no_answer(fleet: Fleet, video: Path, redis_server: RedisServer) -> None:
    with fleet.client() as client:
        context = client.create_context(video, fps=FPS)
        expected = client.ask(context, QUESTION)
        redis_server.kill()
        try:
            for _ in range(3):
                assert client.ask(context, QUESTION).token_ids == expected.token_ids
            other = client.create_context(video, fps=1.0)
            assert client.ask(other, QUESTION).text
        finally:
            redis_server.start()
        time.sleep(1.5)
        third = client.create_context(video, fps=0.5)
        assert client.ask(third, QUESTION).text
        assert wait_until(lambda: written(fleet, third), 60)


def holds(address: str, context: Context) -> bool:
    """Whether a verifier has a context in its pool."""
    with grpc.insecure_channel(address) as channel:
        request = verifier_pb2.ListHeldContextsRequest(name=context.name)
        return bool(verifier_pb2_grpc.VerifierServiceStub(channel).ListHeldContexts(request, timeout=10).contexts)


def num_sequences(address: str) -> int:
    """How many answers a verifier has open."""
    with grpc.insecure_channel(address) as channel:
        request = verifier_pb2.GetVerifierInfoRequest()
        return int(verifier_pb2_grpc.VerifierServiceStub(channel).GetVerifierInfo(request, timeout=10).num_sequences)
