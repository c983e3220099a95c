"""The gateway's side of one Draft call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from foveate.rpc.errors import FoveateError, from_rpc_error
from foveate.v1 import drafter_pb2
from tests.unit.drafter_svc.sequence import NUM_VISUAL, Sequence

if TYPE_CHECKING:
    from foveate.v1.drafter_pb2_grpc import DrafterServiceAsyncStub as Stub


class Stream:
    """One Draft call, request by request."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._next_id = 100

    async def ask(self, **payload: Any) -> drafter_pb2.DraftResponse:
        self._next_id += 1
        try:
            await self.call.write(drafter_pb2.DraftRequest(request_id=self._next_id, **payload))
            reply = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        assert reply.request_id == self._next_id
        return reply  # type: ignore[no-any-return]

    async def round(self, number: int, base_len: int, token_ids: list[int], num: int = 5) -> list[int]:
        asked = drafter_pb2.DraftRound(
            sequence_id="s1", round=number, base_len=base_len, token_ids=token_ids, num_draft_tokens=num
        )
        drafted = (await self.ask(round=asked)).drafted
        assert (drafted.round, drafted.base_len) == (number, base_len)
        assert not num or drafted.model_us > 0
        return list(drafted.draft_token_ids)


@asynccontextmanager
async def drafting(stub: Stub, sequence: Sequence, **changes: object) -> AsyncIterator[Stream]:
    stream = Stream(stub.Draft())
    try:
        opened = (await stream.ask(open=sequence.open_message(**changes))).opened
        assert opened.num_sparse_tokens == sequence.num_context_tokens - NUM_VISUAL + sequence.selection.num_selected
        yield stream
    finally:
        stream.call.cancel()


@asynccontextmanager
async def opened_with(stub: Stub, message: drafter_pb2.OpenDraft) -> AsyncIterator[tuple[Stream, int]]:
    """Opens a sequence; yields the stream and how many rows of the context the drafter reads."""
    stream = Stream(stub.Draft())
    try:
        yield stream, (await stream.ask(open=message)).opened.num_sparse_tokens
    finally:
        stream.call.cancel()


async def refused(stream: Stream, **payload: Any) -> FoveateError:
    with pytest.raises(FoveateError) as error:
        await stream.ask(**payload)
    return error.value
