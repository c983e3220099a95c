"""Contexts through the real gateway: relayed uploads with back pressure, lookups, pages, deletion."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import grpc
import pytest

from foveate.v1 import contexts_pb2
from tests.fakes import CONTEXT, FakeDrafter, FakeVerifier, Stack, ToyModel, running_stack, until

MODEL = ToyModel.of("The red square moves left.")
MIB = 1024 * 1024
Create = contexts_pb2.CreateContextRequest


def upload_spec(total_bytes: int = 0) -> contexts_pb2.CreateContextRequest:
    upload = contexts_pb2.Upload(filename="clip.mp4", total_bytes=total_bytes)
    return Create(spec=contexts_pb2.ContextSpec(upload=upload))


def chunk(offset: int, data: bytes) -> contexts_pb2.CreateContextRequest:
    return Create(chunk=contexts_pb2.MediaChunk(write_offset=offset, data=data))


async def create(
    stack: Stack, *requests: contexts_pb2.CreateContextRequest
) -> list[contexts_pb2.CreateContextResponse]:
    async def send() -> AsyncIterator[contexts_pb2.CreateContextRequest]:
        for request in requests:
            yield request

    return [response async for response in stack.contexts.CreateContext(send())]


async def fails(awaitable: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code()


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL)) as running:
        yield running


async def test_an_upload_reaches_the_verifier_byte_for_byte(stack: Stack) -> None:
    data = bytes(range(256)) * 4096 * 3
    chunks = [chunk(start, data[start : start + MIB]) for start in range(0, len(data), MIB)]
    responses = await create(stack, upload_spec(len(data)), *chunks)
    assert stack.verifier.upload == data
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["progress"] * (len(kinds) - 1) + ["context"]
    assert responses[-2].progress.done == len(data)
    made = responses[-1].context
    assert made.name == f"contexts/{hashlib.sha256(data).hexdigest()}"
    assert list(made.video.frame_timestamps_s) == [0.0, 0.5]
    again = await create(stack, upload_spec(), *chunks)
    assert (made.reused, again[-1].context.reused) == (False, True)


async def test_a_path_is_handed_on(stack: Stack) -> None:
    responses = await create(stack, Create(spec=contexts_pb2.ContextSpec(path="clips/a.mp4")))
    assert responses[-1].WhichOneof("event") == "context"


async def test_the_gateway_does_not_swallow_an_upload(stack: Stack) -> None:
    """While the verifier takes nothing, only the windows of the two connections fill up, whatever the file's size."""
    stack.verifier.upload_gate = asyncio.Event()
    stack.verifier.max_upload_bytes = 1 << 40
    num_sent = 0

    async def send() -> AsyncIterator[contexts_pb2.CreateContextRequest]:
        nonlocal num_sent
        yield upload_spec()
        for index in range(400):
            yield chunk(index * MIB, b"x" * MIB)
            num_sent += 1

    call = stack.contexts.CreateContext(send())
    assert (await call.read()).WhichOneof("event") == "progress"
    previous = -1
    while num_sent != previous:
        previous = num_sent
        await asyncio.sleep(0.3)
    assert num_sent < 60
    call.cancel()
    await until(lambda: stack.verifier.streams.num_open == 0, within_s=1)


@pytest.mark.parametrize(
    ("requests", "code"),
    [
        ([], grpc.StatusCode.INVALID_ARGUMENT),
        ([Create()], grpc.StatusCode.INVALID_ARGUMENT),
        ([chunk(0, b"x")], grpc.StatusCode.INVALID_ARGUMENT),
        ([upload_spec(), chunk(5, b"x")], grpc.StatusCode.INVALID_ARGUMENT),
        ([upload_spec(), chunk(0, b"x" * (MIB + 1))], grpc.StatusCode.INVALID_ARGUMENT),
        ([Create(spec=contexts_pb2.ContextSpec())], grpc.StatusCode.INVALID_ARGUMENT),
        ([upload_spec(1 << 32)], grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_wrong_uploads_are_refused_and_the_next_is_served(
    stack: Stack, requests: list[contexts_pb2.CreateContextRequest], code: grpc.StatusCode
) -> None:
    assert await fails(create(stack, *requests)) == code
    await until(lambda: stack.verifier.streams.num_open == 0, within_s=1)
    assert (await create(stack, upload_spec(), chunk(0, b"ok")))[-1].HasField("context")


async def test_get_list_delete(stack: Stack) -> None:
    for index in range(5):
        stack.verifier.add_context(f"contexts/c{index}", seconds=10 + index // 2)
    names: list[str] = []
    token = ""
    while True:
        page = await stack.contexts.ListContexts(contexts_pb2.ListContextsRequest(page_size=2, page_token=token))
        names += [held.name for held in page.contexts]
        token = page.next_page_token
        if not token:
            break
        # Deleting what was seen neither skips nor repeats anything.
        await stack.contexts.DeleteContext(contexts_pb2.DeleteContextRequest(name=page.contexts[-1].name))
    assert names == ["contexts/c4", "contexts/c2", "contexts/c3", "contexts/c0", "contexts/c1", CONTEXT]

    got = await stack.contexts.GetContext(contexts_pb2.GetContextRequest(name=CONTEXT))
    assert (got.context.name, got.context.num_visual_tokens, got.context.kv_bytes) == (CONTEXT, 16, 1024)
    await stack.contexts.DeleteContext(contexts_pb2.DeleteContextRequest(name=CONTEXT))
    not_found = grpc.StatusCode.NOT_FOUND
    assert await fails(stack.contexts.GetContext(contexts_pb2.GetContextRequest(name=CONTEXT))) == not_found
    assert await fails(stack.contexts.DeleteContext(contexts_pb2.DeleteContextRequest(name=CONTEXT))) == not_found


@pytest.mark.parametrize("token", ["x", "not base64!", "YWJj", "eCB5"])
async def test_unknown_page_tokens(stack: Stack, token: str) -> None:
    request = contexts_pb2.ListContextsRequest(page_token=token)
    assert await fails(stack.contexts.ListContexts(request)) == grpc.StatusCode.INVALID_ARGUMENT


async def test_malformed_names_and_sizes(stack: Stack) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert await fails(stack.contexts.GetContext(contexts_pb2.GetContextRequest(name="a/b"))) == invalid
    assert await fails(stack.contexts.DeleteContext(contexts_pb2.DeleteContextRequest(name=""))) == invalid
    assert await fails(stack.contexts.ListContexts(contexts_pb2.ListContextsRequest(page_size=1001))) == invalid


async def test_20_mb_go_through_in_chunks_and_what_is_over_the_limit_hears_the_number() -> None:
    """Case G3."""
    verifier = FakeVerifier(MODEL)
    verifier.max_upload_bytes = 20_000_000
    data = bytes(20_000_000)
    chunks = [chunk(start, data[start : start + MIB]) for start in range(0, len(data), MIB)]
    async with running_stack(verifier, FakeDrafter(MODEL)) as stack:
        responses = await create(stack, upload_spec(), *chunks)
        assert responses[-1].HasField("context")
        assert verifier.upload == data
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await create(stack, upload_spec(20_000_001))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "20000000" in (caught.value.details() or "")
