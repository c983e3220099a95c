"""Clients of the verifier and the drafter: one bidirectional stream per answer to each. Protobuf stops here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from enum import Enum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foveate.rpc.errors import FoveateError
from foveate.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from gateway.codec import contexts as context_codec
from gateway.codec import sequences as codec
from gateway.exchange import END, Deadline, Exchange, closing, mapped, peer_error
from gateway.facts import Context, ContextProgress, ContextSpec, DrafterInfo, HeldContext, MediaChunk, VerifierInfo
from gateway.values import Draft, Head, Measured, OpenedSequence, Question, Signals, Verified


class Health(Enum):
    """What a look at a peer found."""

    SERVING = "serving"
    NOT_SERVING = "not serving"  # it says so (it loads or drains), or nobody is there
    SILENT = "silent"  # it takes the call and does not answer


class VerifierSequence:
    """An open sequence of the verifier."""

    def __init__(
        self,
        exchange: Exchange[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse],
        opened: OpenedSequence,
        signals: Signals,
    ) -> None:
        self.opened = opened
        self._signals = signals
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
        measured = codec.measured(verified)
        if not _is_complete(measured, self._signals, num_places=len(targets)):
            raise self._exchange.wrong("did not measure what it was asked to")
        return Verified(targets, verified.model_us, measured)


class VerifierClient:
    """The verifier behind a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: verifier_pb2_grpc.VerifierServiceAsyncStub = verifier_pb2_grpc.VerifierServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._exchanges: set[Exchange[Any, Any]] = set()

    async def health(self, timeout_s: float) -> Health:
        """Returns what the verifier says of itself within `timeout_s`."""
        return await _health(self._health, "foveate.v1.VerifierService", timeout_s)

    def give_up_answers(self) -> None:
        """Ends every open sequence as lost: the verifier does not answer any more."""
        for exchange in list(self._exchanges):
            exchange.give_up()

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

    async def contexts(
        self, deadline: Deadline, *, tenant: str = "", name: str = "", include_cold: bool = True
    ) -> list[Context]:
        """Returns a tenant's contexts, or the one that is named, newest first."""
        with mapped("verifier"):
            request = verifier_pb2.ListHeldContextsRequest(tenant=tenant, name=name, include_cold=include_cold)
            response = await self._stub.ListHeldContexts(request, timeout=deadline.remaining_s())
            return [context_codec.context(held) for held in response.contexts]

    async def release_context(self, name: str, deadline: Deadline, *, tenant: str = "") -> None:
        """Frees a context, and deletes its cold copies. Raises NotFound."""
        with mapped("verifier"):
            request = verifier_pb2.ReleaseContextRequest(name=name, tenant=tenant)
            await self._stub.ReleaseContext(request, timeout=deadline.remaining_s())

    async def touch_context(self, name: str, deadline: Deadline, *, tenant: str, pinned: bool | None) -> Context:
        """Puts a context's expiry off, and pins or unpins it. Raises NotFound."""
        with mapped("verifier"):
            request = verifier_pb2.TouchHeldContextRequest(name=name, tenant=tenant, pinned=pinned)
            response = await self._stub.TouchHeldContext(request, timeout=deadline.remaining_s())
            return context_codec.context(response.context)

    async def watch(
        self, deadline: Deadline, *, tenant: str, request_id: str, name: str
    ) -> AsyncGenerator[ContextProgress | Context]:
        """Yields the progress of a creation, or of a context that is being made, and then the context."""
        target = {"request_id": request_id} if request_id else {"name": name}
        request = verifier_pb2.WatchPrefillRequest(tenant=tenant, **target)
        with mapped("verifier"):
            call = self._stub.WatchPrefill(request, timeout=deadline.remaining_s())
        try:
            with mapped("verifier"):
                async for response in call:
                    yield context_codec.watch_event(response)
        finally:
            call.cancel()

    async def prefill(
        self,
        parts: AsyncIterator[ContextSpec | MediaChunk],
        deadline: Deadline,
        *,
        tenant: str = "",
        usable_pool_ids: frozenset[str] = frozenset(),
    ) -> AsyncGenerator[ContextProgress | HeldContext]:
        """Prefills a video, whose parts are sent on one at a time; yields progress and then the context."""
        with mapped("verifier"):
            call = self._stub.Prefill(timeout=deadline.remaining_s())
        encode = functools.partial(context_codec.prefill_request, tenant=tenant, usable_pool_ids=usable_pool_ids)
        pump = asyncio.create_task(_pump(parts, call, encode))
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
        with mapped("verifier"):
            exchange = Exchange("verifier", self._stub.Verify(timeout=deadline.remaining_s()))
        self._exchanges.add(exchange)
        try:
            async with closing(exchange):
                request = verifier_pb2.VerifyRequest(request_id=exchange.next_id(), open=codec.open_sequence(question))
                reply = await exchange.ask(request)
                yield VerifierSequence(exchange, codec.opened_sequence(reply.opened), question.signals)
        finally:
            self._exchanges.discard(exchange)


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
        return await _health(self._health, "foveate.v1.DrafterService", timeout_s) is Health.SERVING

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
        with mapped("drafter"):
            exchange = Exchange("drafter", self._stub.Draft(timeout=deadline.remaining_s()))
        async with closing(exchange):
            request = drafter_pb2.DraftRequest(request_id=exchange.next_id(), open=codec.open_draft(question, sequence))
            async with asyncio.timeout(attach_timeout_s):
                await exchange.ask(request)
            yield DrafterSequence(exchange, sequence.sequence_id)


def _is_complete(measured: Measured, asked: Signals, *, num_places: int) -> bool:
    """Returns whether there is a value at every place for everything that was asked for."""
    return (
        (len(measured.relevance) == num_places or not asked.relevance)
        and (len(measured.entropy) == num_places or not asked.entropy)
        and (len(measured.draft_log_probabilities) == num_places - 1 or not asked.log_probabilities)
        and (len(measured.target_log_probabilities) == num_places or not asked.log_probabilities)
        and (len(measured.top) == num_places or not asked.num_top)
    )


async def _health(stub: Any, service: str, timeout_s: float) -> Health:
    try:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError as error:
        is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return Health.SILENT if is_silent else Health.NOT_SERVING
    except grpc.aio.UsageError:  # it has left
        return Health.NOT_SERVING
    return Health.SERVING if reply.status == health_pb2.HealthCheckResponse.SERVING else Health.NOT_SERVING


async def _pump(
    parts: AsyncIterator[ContextSpec | MediaChunk],
    call: grpc.aio.StreamStreamCall[verifier_pb2.PrefillRequest, Any],
    encode: Callable[[ContextSpec | MediaChunk], verifier_pb2.PrefillRequest],
) -> None:
    """Sends parts on as the peer takes them; at most one is in memory here."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError):  # over already: reading tells why
        async for part in parts:
            await call.write(encode(part))
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
