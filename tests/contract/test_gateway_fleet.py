"""Several verifiers behind one gateway: who is asked, who goes on when one is lost, what they hold together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from foveate.rpc.channel import open_channel
from foveate.v1 import answers_pb2, answers_pb2_grpc, contexts_pb2, contexts_pb2_grpc
from gateway.config import GatewayConfig
from tests.fakes import (
    CONTEXT,
    PROMPT_TEXT,
    FakeDrafter,
    FakeVerifier,
    Stack,
    ToyModel,
    ask,
    serving_drafter,
    serving_gateway,
    serving_verifier,
    until,
)

TEXT = "The red square moves left and the blue circle turns, then the green triangle stands still. 🙂 "
MODEL = ToyModel.of(TEXT)
OTHER = "contexts/" + "cd" * 32


class Fleet:
    """Two fake verifiers and a gateway on both."""

    def __init__(self, stack: Stack, verifiers: tuple[FakeVerifier, FakeVerifier]) -> None:
        self.stack = stack
        self.verifiers = verifiers

    @property
    def num_opens(self) -> list[int]:
        return [len(verifier.opens) for verifier in self.verifiers]


@contextlib.asynccontextmanager
async def fleet_of(**settings: Any) -> AsyncIterator[Fleet]:
    verifiers = FakeVerifier(MODEL), FakeVerifier(MODEL)
    for name, verifier in zip("ab", verifiers, strict=True):
        verifier.pool_id = f"pool-{name}"
        verifier.contexts.clear()
    drafter = FakeDrafter(MODEL, agreement=0.7)
    async with (
        serving_verifier(verifiers[0]) as one,
        serving_verifier(verifiers[1]) as two,
        serving_drafter(drafter) as drafting,
    ):
        config = GatewayConfig(
            verifier=f"127.0.0.1:{one.port}, 127.0.0.1:{two.port}",
            drafter=f"127.0.0.1:{drafting.port}",
            health_interval_s=0.05,
            **settings,
        )
        async with serving_gateway(verifiers[0], drafter, config) as stack:
            await until(lambda: stack.backends.verifiers.num_ready == 2 and stack.backends.drafters.is_ready)
            yield Fleet(stack, verifiers)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with fleet_of() as running:
        yield running


@pytest.mark.parametrize("holder", [0, 1])
async def test_a_question_goes_to_whoever_holds_the_context(fleet: Fleet, holder: int) -> None:
    fleet.verifiers[holder].add_context(CONTEXT, seconds=1)
    for _ in range(4):
        assert (await ask(fleet.stack)).text == TEXT
    assert fleet.num_opens[holder] == 4
    assert fleet.num_opens[1 - holder] <= 1  # asked once at most, before it was known who holds it


async def test_a_context_that_nobody_holds(fleet: Fleet) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(fleet.stack)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert fleet.num_opens == [1, 1]


@pytest.mark.parametrize(
    "mode", [answers_pb2.DRAFT_MODE_OFF, answers_pb2.DRAFT_MODE_NGRAM, answers_pb2.DRAFT_MODE_SPARSE]
)
@pytest.mark.parametrize("dies_in", [1, 2, 5])
async def test_an_answer_outlives_its_verifier(fleet: Fleet, mode: int, dies_in: int) -> None:
    for verifier in fleet.verifiers:
        verifier.add_context(CONTEXT, seconds=1)
    expected = await ask(fleet.stack, drafting=answers_pb2.Drafting(mode=mode))
    first = next(verifier for verifier in fleet.verifiers if verifier.opens)
    second = next(verifier for verifier in fleet.verifiers if verifier is not first)
    first.die_in_round = dies_in
    answered = await ask(fleet.stack, drafting=answers_pb2.Drafting(mode=mode))
    assert (answered.text, answered.token_ids) == (expected.text, expected.token_ids)
    assert answered.finished.guarantee == answers_pb2.GUARANTEE_LOSSLESS
    assert answered.finished.num_prompt_tokens == expected.finished.num_prompt_tokens
    (resumed,) = second.opens
    num_before = len(resumed.answer_token_ids)
    assert tuple(resumed.answer_token_ids) == MODEL.answer(1000)[:num_before]
    assert num_before >= dies_in - 1
    info = await fleet.stack.answers.GetServerInfo(answers_pb2.GetServerInfoRequest())
    assert info.context_counters["gateway_verifiers_lost"] == 1


@pytest.mark.parametrize("dies_in", [0, 3], ids=["from the start", "after a loss"])
async def test_an_answer_on_eight_bits_says_so(fleet: Fleet, dies_in: int) -> None:
    for verifier in fleet.verifiers:
        verifier.add_context(CONTEXT, seconds=1)
    drafting = answers_pb2.Drafting(mode=answers_pb2.DRAFT_MODE_OFF)
    exact = await ask(fleet.stack, drafting=drafting)
    assert (exact.finished.guarantee, list(exact.finished.notes)) == (answers_pb2.GUARANTEE_LOSSLESS, [])
    first = next(verifier for verifier in fleet.verifiers if verifier.opens)
    second = next(verifier for verifier in fleet.verifiers if verifier is not first)
    first.is_context_lossy, second.is_context_lossy = not dies_in, bool(dies_in)
    first.die_in_round = dies_in
    told = (await ask(fleet.stack, drafting=drafting)).finished
    assert told.guarantee == answers_pb2.GUARANTEE_LOSSY_CONTEXT
    assert any("eight bits" in note for note in told.notes)


async def test_an_answer_outlives_several_losses_but_not_all(fleet: Fleet) -> None:
    for verifier in fleet.verifiers:
        verifier.add_context(CONTEXT, seconds=1)
        verifier.die_in_round = 4
    drafting = answers_pb2.Drafting(mode=answers_pb2.DRAFT_MODE_OFF)
    assert (await ask(fleet.stack, drafting=drafting, max_tokens=12)).token_ids == MODEL.answer(12)
    for verifier in fleet.verifiers:
        verifier.die_in_round = 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(fleet.stack, drafting=drafting)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("hangs_in", [0, 3], ids=["before it opens", "in a round"])
async def test_an_answer_leaves_a_verifier_that_has_stopped_to_answer(hangs_in: int) -> None:
    async with fleet_of(health_timeout_s=0.3) as fleet:
        for verifier in fleet.verifiers:
            verifier.add_context(CONTEXT, seconds=1)
        drafting = answers_pb2.Drafting(mode=answers_pb2.DRAFT_MODE_OFF)
        expected = await ask(fleet.stack, drafting=drafting)
        first = next(verifier for verifier in fleet.verifiers if verifier.opens)
        second = next(verifier for verifier in fleet.verifiers if verifier is not first)
        first.hang_in_round, first.is_silent = hangs_in, not hangs_in
        asking = asyncio.create_task(ask(fleet.stack, drafting=drafting))
        if hangs_in:  # it only takes long, and says so: nobody takes its answer away
            await until(lambda: len(first.opens) == 2)
            await asyncio.sleep(1.0)
            assert not second.opens
        first.is_silent = True
        answered = await asyncio.wait_for(asking, 20)
        assert answered.token_ids == expected.token_ids
        (resumed,) = second.opens
        assert len(resumed.answer_token_ids) == max(0, hangs_in - 1)
        assert fleet.stack.backends.verifiers.num_ready == 1
        first.is_silent = False
        await until(lambda: fleet.stack.backends.verifiers.num_ready == 2)


async def test_the_only_verifier_is_waited_for() -> None:
    async with fleet_of(health_timeout_s=0.3) as fleet:
        first, second = fleet.verifiers
        second.is_silent = True
        await until(lambda: fleet.stack.backends.verifiers.num_ready == 1)
        first.add_context(CONTEXT, seconds=1)
        first.is_silent = True
        asking = asyncio.create_task(ask(fleet.stack))
        await asyncio.sleep(1.0)
        first.is_silent = False
        assert (await asking).text == TEXT


async def test_a_verifier_that_went_away_is_not_in_the_way(fleet: Fleet) -> None:
    for verifier in fleet.verifiers:
        verifier.add_context(CONTEXT, seconds=1)
    await ask(fleet.stack)
    first = next(verifier for verifier in fleet.verifiers if verifier.opens)
    first.die_in_open = True
    assert (await ask(fleet.stack)).text == TEXT


async def test_what_they_hold_together(fleet: Fleet) -> None:
    one, two = fleet.verifiers
    for verifier in fleet.verifiers:
        verifier.add_context(CONTEXT, seconds=1)
    two.add_context(OTHER, seconds=2)
    for index, context in enumerate((one.contexts[CONTEXT], two.contexts[CONTEXT])):
        context.state = contexts_pb2.CONTEXT_STATE_READY
        context.num_hits = 3 + index
        context.tiers.add(tier=contexts_pb2.CONTEXT_SOURCE_POOL, num_bytes=1024)
        context.tiers.add(tier=contexts_pb2.CONTEXT_SOURCE_COLD_KV, num_bytes=1000)
        context.expire_time.FromSeconds(100 + index)
    two.contexts[OTHER].state = contexts_pb2.CONTEXT_STATE_COLD
    two.contexts[OTHER].media_sha256 = "ee" * 32
    contexts = fleet.stack.contexts
    held = (await contexts.GetContext(contexts_pb2.GetContextRequest(name=CONTEXT))).context
    assert (held.num_hits, held.kv_bytes, held.expire_time.seconds) == (7, 2048, 101)
    assert [(use.tier, use.num_bytes) for use in held.tiers] == [
        (contexts_pb2.CONTEXT_SOURCE_POOL, 2048),
        (contexts_pb2.CONTEXT_SOURCE_COLD_KV, 1000),
    ]

    async def listed(**wanted: Any) -> list[str]:
        return [one.name for one in (await contexts.ListContexts(contexts_pb2.ListContextsRequest(**wanted))).contexts]

    assert await listed() == [OTHER, CONTEXT]
    assert await listed(state=contexts_pb2.CONTEXT_STATE_READY) == [CONTEXT]
    assert await listed(state=contexts_pb2.CONTEXT_STATE_COLD) == [OTHER]
    assert await listed(media_sha256="ee" * 32) == [OTHER]
    assert await listed(media_sha256="ff" * 32) == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await listed(state=77)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    touched = await contexts.TouchContext(contexts_pb2.TouchContextRequest(name=OTHER, pinned=True))
    assert touched.context.pinned
    await contexts.DeleteContext(contexts_pb2.DeleteContextRequest(name=CONTEXT))
    assert CONTEXT not in one.contexts
    assert CONTEXT not in two.contexts
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await contexts.DeleteContext(contexts_pb2.DeleteContextRequest(name=CONTEXT))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_creation_says_which_other_pools_will_do(fleet: Fleet) -> None:
    async def send() -> AsyncIterator[contexts_pb2.CreateContextRequest]:
        yield contexts_pb2.CreateContextRequest(spec=contexts_pb2.ContextSpec(path="clips/a.mp4"))

    for _ in range(3):
        last = [response async for response in fleet.stack.contexts.CreateContext(send())][-1]
        assert last.HasField("context")
    specs = [verifier.prefills for verifier in fleet.verifiers]
    assert sorted(map(len, specs)) == [0, 3]  # a path always goes to the same verifier
    for spec in (*specs[0], *specs[1]):
        assert list(spec.usable_pool_ids) == ["pool-a", "pool-b"]


async def test_tenants_are_told_apart_by_the_header() -> None:
    async with fleet_of(tenant_header="x-tenant") as fleet:
        fleet.verifiers[0].add_context(CONTEXT, seconds=1)
        async with open_channel(f"127.0.0.1:{fleet.stack.server.port}") as channel:
            answers: Any = answers_pb2_grpc.AnswerServiceStub(channel)
            contexts: Any = contexts_pb2_grpc.ContextServiceStub(channel)
            request = answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT)
            async for _ in answers.Ask(request, metadata=(("x-tenant", "us"),)):
                pass
            assert {one.tenant for verifier in fleet.verifiers for one in verifier.opens} == {"us"}
            for metadata in ((), (("x-tenant", "a"), ("x-tenant", "b")), (("x-tenant", "x" * 129),)):
                for call in (answers.Ask(request, metadata=metadata),):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        async for _ in call:
                            pass
                    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await contexts.ListContexts(contexts_pb2.ListContextsRequest(), metadata=metadata)
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_always_goes_to_the_same_verifier_and_is_watched_there(fleet: Fleet) -> None:
    def send(request_id: str) -> Any:
        spec = contexts_pb2.ContextSpec(upload=contexts_pb2.Upload(sha256="ab" * 32), request_id=request_id)
        chunk = contexts_pb2.MediaChunk(write_offset=7, data=b"goes on")
        return iter([contexts_pb2.CreateContextRequest(spec=spec), contexts_pb2.CreateContextRequest(chunk=chunk)])

    for request_id in ("r1", "r2", "r3", "r4", "r5", "r6"):
        for _ in range(2):
            last = [response async for response in fleet.stack.contexts.CreateContext(send(request_id))][-1]
            assert last.HasField("context")
    asked = [[request.spec.request_id for request in verifier.prefills] for verifier in fleet.verifiers]
    assert sorted(asked[0] + asked[1]) == sorted(["r1", "r2", "r3", "r4", "r5", "r6"] * 2)
    assert not set(asked[0]) & set(asked[1])
    watching = fleet.stack.contexts.WatchContext(contexts_pb2.WatchContextRequest(request_id="r1"))
    events = [event async for event in watching]
    assert [event.WhichOneof("event") for event in events] == ["progress", "context"]
    for wrong in ({}, {"request_id": "a b"}, {"name": "x"}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in fleet.stack.contexts.WatchContext(contexts_pb2.WatchContextRequest(**wrong)):
                pass
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in fleet.stack.contexts.WatchContext(contexts_pb2.WatchContextRequest(request_id="never")):
            pass
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
