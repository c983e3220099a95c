"""Conversations that the gateway keeps: turns, regenerating, branches, two answers at once, another gateway."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from bench.redis_server import RedisServer
from foveate.v1 import answers_pb2
from tests.fakes import (
    CONTEXT,
    FakeDrafter,
    FakeVerifier,
    Stack,
    ToyModel,
    ask,
    is_ready,
    running_stack,
    serving_gateway,
    until,
)

MODEL = ToyModel.of("The red square moves left.")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def stack(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[Stack]:
    with redis_server.client() as client:
        client.flushall()
    redis = redis_server.settings() if request.param == "redis" else None
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL), with_drafter=False, redis=redis) as running:
        assert running.backends.registry.kind == request.param
        yield running


def last_history(stack: Stack) -> list[str]:
    return [turn.text for turn in stack.verifier.opens[-1].history]


async def fails(asking: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asking
    return caught.value.code()


async def test_turns_are_kept_and_regenerated(stack: Stack) -> None:
    say = functools.partial(ask, stack, conversation="talk-1")
    first = await say("One?")
    assert first.finished.num_conversation_turns == 1
    assert (await say("Two?", context="")).finished.num_conversation_turns == 2
    assert last_history(stack) == ["One?", "The red square moves left."]
    assert [list(one.token_ids) for one in stack.verifier.opens[-1].history_token_ids] == [
        [],
        list(first.token_ids),
    ]
    assert stack.verifier.opens[-1].context == CONTEXT
    assert (await say("Two again?", keep_turns=1)).finished.num_conversation_turns == 2
    assert last_history(stack) == ["One?", "The red square moves left."]
    assert (await say("Three?")).finished.num_conversation_turns == 3
    assert last_history(stack)[2] == "Two again?"
    assert (await say("From the start?", keep_turns=0)).finished.num_conversation_turns == 1
    assert last_history(stack) == []
    assert (await ask(stack, "Alone?")).finished.num_conversation_turns == 0
    assert last_history(stack) == []


async def test_a_branch_leaves_the_trunk_alone(stack: Stack) -> None:
    await ask(stack, "One?", conversation="trunk")
    await ask(stack, "Two?", conversation="trunk")
    branched = await ask(stack, "Or?", conversation="branch", branch_of="trunk", keep_turns=1)
    assert branched.finished.num_conversation_turns == 2
    assert last_history(stack)[0] == "One?"
    assert (await ask(stack, "And?", conversation="trunk")).finished.num_conversation_turns == 3
    assert last_history(stack)[2] == "Two?"
    assert await fails(ask(stack, "?", conversation="branch", branch_of="trunk")) == grpc.StatusCode.INVALID_ARGUMENT
    assert await fails(ask(stack, "?", conversation="new", branch_of="nothing")) == grpc.StatusCode.NOT_FOUND


async def test_of_two_answers_at_once_one_is_kept_and_the_other_says_so(stack: Stack) -> None:
    stack.verifier.delay_s = 0.02
    both = await asyncio.gather(*(ask(stack, question, conversation="talk") for question in ("A?", "B?")))
    assert sorted(one.finished.num_conversation_turns for one in both) == [0, 1]
    (lost,) = (one for one in both if not one.finished.num_conversation_turns)
    assert any("not kept" in note for note in lost.finished.notes)
    assert (await ask(stack, "C?", conversation="talk")).finished.num_conversation_turns == 2


async def test_an_answer_that_is_cancelled_is_not_kept(stack: Stack) -> None:
    stack.verifier.delay_s = 0.02
    request = answers_pb2.AskRequest(context=CONTEXT, question="One?", conversation="talk")
    call = stack.answers.Ask(request)
    await call.read()
    call.cancel()
    await until(lambda: stack.verifier.streams.num_open == 0)
    assert (await ask(stack, "Two?", conversation="talk")).finished.num_conversation_turns == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"conversation": "a b"},
        {"conversation": "x" * 129},
        {"conversation": "new", "keep_turns": 1},
        {"keep_turns": 1},
        {"branch_of": "a"},
        {"conversation": "new", "history": [answers_pb2.Turn(role=1, text="a"), answers_pb2.Turn(role=2, text="b")]},
        {"conversation": "new", "context": ""},
        {"conversation": "old", "context": "contexts/" + "cd" * 32},
    ],
)
async def test_wrong_fields(stack: Stack, fields: dict[str, Any]) -> None:
    await ask(stack, "One?", conversation="old")
    assert await fails(ask(stack, "?", **fields)) == grpc.StatusCode.INVALID_ARGUMENT


async def test_another_gateway_goes_on(redis_server: RedisServer, tmp_path: Path) -> None:
    async with running_stack(
        FakeVerifier(MODEL), FakeDrafter(MODEL), with_drafter=False, redis=redis_server.settings()
    ) as one:
        await ask(one, "One?", conversation="moving")
        config = one.backends.verifiers._config
        async with serving_gateway(one.verifier, one.drafter, config) as two:
            await until(lambda: is_ready(two.backends))
            assert (await ask(two, "Two?", conversation="moving")).finished.num_conversation_turns == 2
            assert last_history(one)[0] == "One?"


async def test_redis_that_is_gone_is_said_before_and_noted_after(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    settings = server.settings(timeout_s=0.5, breaker_s=0.1)
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL), with_drafter=False, redis=settings) as stack:
        assert await fails(ask(stack, "One?", conversation="talk")) == grpc.StatusCode.UNAVAILABLE
        assert (await ask(stack, "Without one?")).text
        with server:
            await asyncio.sleep(0.15)
            stack.verifier.delay_s = 0.05
            asking = asyncio.create_task(ask(stack, "One?", conversation="talk"))
            await until(lambda: stack.verifier.streams.num_open == 1)
            server.kill()
            answered = await asking
        assert answered.text == "The red square moves left."
        assert answered.finished.num_conversation_turns == 0
        assert any("not kept" in note for note in answered.finished.notes)
