"""Clients of the verifier and the drafter: one bidirectional stream per answer to each. Protobuf stops here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foveate.rpc.errors import FoveateError
from foveate.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from gateway.codec import contexts as context_codec
from gateway.codec import sequences as codec
from gateway.exchange import END, Deadline, Exchange, closing, mapped, peer_error
from gateway.facts import Context, ContextProgress, ContextSpec, DrafterInfo, MediaChunk, VerifierInfo
from gateway.values import Draft, Head, OpenedSequence, Question, Verified


class VerifierSequence:
    """An open sequence of the verifier."""

    def __init__(
        self,
        exchange: Exchange[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse],
        opened: OpenedSequence,
    ) -> None:
        self.opened = opened
        self._exchange = exchange

    async def verify(self, head: Head, draft: Draft) -> Verified:
        """Returns the target's choices for a round."""
        verify_round = verifier_pb2.VerifyRound(
            sequence_id=self.opened.sequence_id,
            round=head.round,
            base_len=head.base_len,
            token_ids=head.token_ids,
            draft_token_ids=draft.token_ids,
        )
        request = verifier_pb2.VerifyRequest(request_id=self._exchange.next_id(), round=verify_round)
        verified = (await self._exchange.ask(request)).verified
        targets = tuple(verified.target_token_ids)
        if (verified.round, verified.base_len, len(targets)) != (head.round, head.base_len, len(draft.token_ids) + 1):
            raise self._exchange.wrong(f"sent another round than round {head.round}")
        return Verified(targets, verified.model_us)


class VerifierClient:
    """The verifier behind a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: verifier_pb2_grpc.VerifierServiceAsyncStub = verifier_pb2_grpc.VerifierServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def is_serving(self, timeout_s: float) -> bool:
        """Returns whether the verifier says SERVING."""
        return await _is_serving(self._health, "foveate.v1.VerifierService", timeout_s)

    async def info(self, timeout_s: float | None = None) -> VerifierInfo:
        """Returns what the verifier runs."""
        with mapped("verifier"):
            request = verifier_pb2.GetVerifierInfoRequest()
            return codec.verifier_info(await self._stub.GetVerifierInfo(request, timeout=timeout_s))

    async def tokenizer_json(self, timeout_s: float | None = None) -> bytes:
        """Returns the model's tokenizer.json."""
        with mapped("verifier"):
            call = self._stub.GetTokenizer(verifier_pb2.GetTokenizerRequest(), timeout=timeout_s)
            return b"".join([response.data async for response in call])

    async def contexts(self, deadline: Deadline) -> list[Context]:
        """Returns the contexts that are held, newest first."""
        with mapped("verifier"):
            request = verifier_pb2.ListHeldContextsRequest()
            response = await self._stub.ListHeldContexts(request, timeout=deadline.remaining_s())
            return [context_codec.context(held) for held in response.contexts]

    async def release_context(self, name: str, deadline: Deadline) -> None:
        """Frees a context. Raises NotFound."""
        with mapped("verifier"):
            request = verifier_pb2.ReleaseContextRequest(name=name)
            await self._stub.ReleaseContext(request, timeout=deadline.remaining_s())

    async def prefill(
        self, parts: AsyncIterator[ContextSpec | MediaChunk], deadline: Deadline
    ) -> AsyncGenerator[ContextProgress | Context]:
        """Prefills a video, whose parts are sent on one at a time; yields progress and then the context."""
        call = self._stub.Prefill(timeout=deadline.remaining_s())
        pump = asyncio.create_task(_pump(parts, call))
        pump.add_done_callback(_retrieve)
        try:
            while (response := await _read_beside(call, pump)) is not END:
                yield context_codec.prefill_event(response)
        except grpc.RpcError as error:
            raise peer_error("verifier", error) from error
        finally:
            pump.cancel()
            call.cancel()

    @contextlib.asynccontextmanager
    async def open_sequence(self, question: Question, deadline: Deadline) -> AsyncIterator[VerifierSequence]:
        """Prefills the question on its context; the sequence lives as long as the block."""
        exchange = Exchange("verifier", self._stub.Verify(timeout=deadline.remaining_s()))
        async with closing(exchange):
            request = verifier_pb2.VerifyRequest(request_id=exchange.next_id(), open=codec.open_sequence(question))
            reply = await exchange.ask(request)
            yield VerifierSequence(exchange, codec.opened_sequence(reply.opened))


class DrafterSequence:
    """A drafter attached to a sequence."""

    def __init__(
        self, exchange: Exchange[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse], sequence_id: str
    ) -> None:
        self._exchange = exchange
        self._sequence_id = sequence_id

    async def draft(self, head: Head, num_draft_tokens: int) -> Draft:
        """Returns a draft for a round."""
        draft_round = drafter_pb2.DraftRound(
            sequence_id=self._sequence_id,
            round=head.round,
            base_len=head.base_len,
            token_ids=head.token_ids,
            num_draft_tokens=num_draft_tokens,
        )
        request = drafter_pb2.DraftRequest(request_id=self._exchange.next_id(), round=draft_round)
        drafted = (await self._exchange.ask(request)).drafted
        if (drafted.round, drafted.base_len) != (head.round, head.base_len):
            raise self._exchange.wrong(f"sent another round than round {head.round}")
        if len(drafted.draft_token_ids) > num_draft_tokens:
            raise self._exchange.wrong(f"sent more than {num_draft_tokens} draft tokens")
        return Draft(tuple(drafted.draft_token_ids), drafted.model_us)

    def wrong(self, what: str) -> FoveateError:
        """Returns the error of a drafter that breaks the contract."""
        return self._exchange.wrong(what)

    def cancel(self) -> None:
        """Gives the drafter up; its scratch is freed."""
        self._exchange.cancel()


class DrafterClient:
    """The drafter behind a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: drafter_pb2_grpc.DrafterServiceAsyncStub = drafter_pb2_grpc.DrafterServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def is_serving(self, timeout_s: float) -> bool:
        """Returns whether the drafter says SERVING."""
        return await _is_serving(self._health, "foveate.v1.DrafterService", timeout_s)

    async def info(self, timeout_s: float | None = None) -> DrafterInfo:
        """Returns what the drafter runs."""
        with mapped("drafter"):
            request = drafter_pb2.GetDrafterInfoRequest()
            return codec.drafter_info(await self._stub.GetDrafterInfo(request, timeout=timeout_s))

    @contextlib.asynccontextmanager
    async def attach(
        self, question: Question, sequence: OpenedSequence, *, deadline: Deadline, attach_timeout_s: float
    ) -> AsyncIterator[DrafterSequence]:
        """Attaches to a sequence's KV for as long as the block lives. Raises TimeoutError when that takes too long."""
        exchange = Exchange("drafter", self._stub.Draft(timeout=deadline.remaining_s()))
        async with closing(exchange):
            request = drafter_pb2.DraftRequest(request_id=exchange.next_id(), open=codec.open_draft(question, sequence))
            async with asyncio.timeout(attach_timeout_s):
                await exchange.ask(request)
            yield DrafterSequence(exchange, sequence.sequence_id)


async def _is_serving(stub: Any, service: str, timeout_s: float) -> bool:
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def _pump(
    parts: AsyncIterator[ContextSpec | MediaChunk], call: grpc.aio.StreamStreamCall[verifier_pb2.PrefillRequest, Any]
) -> None:
    """Sends parts on as the peer takes them; at most one is in memory here."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError):  # over already: reading tells why
        async for part in parts:
            await call.write(context_codec.prefill_request(part))
        await call.done_writing()


def _retrieve(task: asyncio.Task[None]) -> None:
    """Looks at a task's exception, which is of no interest when the call ended first."""
    if not task.cancelled():
        task.exception()


async def _read_beside(call: grpc.aio.StreamStreamCall[Any, Any], pump: asyncio.Task[None]) -> Any:
    """Reads a message, unless the sending side fails first; then raises what failed there."""
    reading: asyncio.Task[Any] = asyncio.create_task(call.read())
    try:
        await asyncio.wait((reading, pump), return_when=asyncio.FIRST_COMPLETED)
        if pump.done():
            pump.result()
        return await reading
    finally:
        reading.cancel()
