"""VerifierService: parse, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from foveate.rpc.channel import CHUNK_BYTES
from foveate.rpc.errors import Unavailable, invalid
from foveate.v1 import verifier_pb2, verifier_pb2_grpc
from verifier_svc import messages
from verifier_svc.identity import parse_context_name
from verifier_svc.progress import Progress
from verifier_svc.receiving import UploadChunk
from verifier_svc.sessions import Session
from verifier_svc.verifier import Verifier

ServicerContext = grpc.aio.ServicerContext[Any, Any]


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves a Verifier; UNAVAILABLE until it is loaded."""

    def __init__(self) -> None:
        self._verifier: Verifier | None = None

    def serve(self, verifier: Verifier) -> None:
        """Starts answering."""
        self._verifier = verifier

    async def GetVerifierInfo(
        self, request: verifier_pb2.GetVerifierInfoRequest, context: ServicerContext
    ) -> verifier_pb2.GetVerifierInfoResponse:
        return messages.info_message(self._loaded())

    async def GetTokenizer(
        self, request: verifier_pb2.GetTokenizerRequest, context: ServicerContext
    ) -> AsyncIterator[verifier_pb2.GetTokenizerResponse]:
        data = self._loaded().parts.loaded.tokenizer_json
        for start in range(0, len(data), CHUNK_BYTES):
            yield verifier_pb2.GetTokenizerResponse(data=data[start : start + CHUNK_BYTES])

    # Both streams write from the handler rather than yield: a cancelled call then always raises inside the block that
    # frees what it holds.
    async def Prefill(  # type: ignore[override]
        self, request_iterator: AsyncIterator[verifier_pb2.PrefillRequest], context: ServicerContext
    ) -> None:
        verifier = self._loaded()
        spec = messages.parse_spec(await _first(request_iterator))

        async def emit(progress: Progress) -> None:
            await context.write(verifier_pb2.PrefillResponse(progress=messages.progress_message(progress)))

        created = await verifier.create_context(spec, _chunks(request_iterator), emit)
        await context.write(verifier_pb2.PrefillResponse(context=created.context, holder_pool_id=created.pool_id))

    async def WatchPrefill(  # type: ignore[override]
        self, request: verifier_pb2.WatchPrefillRequest, context: ServicerContext
    ) -> None:
        async def emit(progress: Progress) -> None:
            await context.write(verifier_pb2.WatchPrefillResponse(progress=messages.progress_message(progress)))

        if request.WhichOneof("target") is None:
            raise invalid("target", "must be a request_id or a name")
        context_id = parse_context_name(request.name, "name") if request.name else ""
        watched = await self._loaded().watch(
            request.tenant, request_id=request.request_id, context_id=context_id, emit=emit
        )
        await context.write(verifier_pb2.WatchPrefillResponse(context=watched))

    async def ListHeldContexts(
        self, request: verifier_pb2.ListHeldContextsRequest, context: ServicerContext
    ) -> verifier_pb2.ListHeldContextsResponse:
        context_id = parse_context_name(request.name, "name") if request.name else None
        contexts = await self._loaded().listed_contexts(
            request.tenant, include_cold=request.include_cold, context_id=context_id
        )
        return verifier_pb2.ListHeldContextsResponse(contexts=contexts)

    async def ReleaseContext(
        self, request: verifier_pb2.ReleaseContextRequest, context: ServicerContext
    ) -> verifier_pb2.ReleaseContextResponse:
        context_id = parse_context_name(request.name, "name")
        await self._loaded().release_context(context_id, request.tenant)
        return verifier_pb2.ReleaseContextResponse()

    async def TouchHeldContext(
        self, request: verifier_pb2.TouchHeldContextRequest, context: ServicerContext
    ) -> verifier_pb2.TouchHeldContextResponse:
        context_id = parse_context_name(request.name, "name")
        pinned = request.pinned if request.HasField("pinned") else None
        touched = await self._loaded().touch_context(context_id, request.tenant, pinned=pinned)
        return verifier_pb2.TouchHeldContextResponse(context=touched)

    async def Verify(  # type: ignore[override]
        self, request_iterator: AsyncIterator[verifier_pb2.VerifyRequest], context: ServicerContext
    ) -> None:
        async with self._loaded().session() as session:
            async for request in request_iterator:
                await context.write(await self._reply(session, request))

    async def _reply(self, session: Session, request: verifier_pb2.VerifyRequest) -> verifier_pb2.VerifyResponse:
        response = verifier_pb2.VerifyResponse(request_id=request.request_id)
        match request.WhichOneof("payload"):
            case "open":
                opened = await session.open(
                    messages.parse_open(request.open, vocab_size=self._loaded().parts.vocab_size)
                )
                response.opened.CopyFrom(messages.opened_message(opened, self._loaded().parts.pool.handle))
            case "round":
                verified = await session.verify(messages.parse_round(request.round))
                response.verified.CopyFrom(messages.verified_message(verified))
            case _:
                raise invalid("payload", "must be open or round")
        return response

    def _loaded(self) -> Verifier:
        if self._verifier is None:
            raise Unavailable("the model is still loading", reason="LOADING", retry_after_s=1.0)
        return self._verifier


async def _first(requests: AsyncIterator[verifier_pb2.PrefillRequest]) -> verifier_pb2.PrefillRequest:
    async for request in requests:
        return request
    raise invalid("spec", "must be the first message")


async def _chunks(requests: AsyncIterator[verifier_pb2.PrefillRequest]) -> AsyncIterator[UploadChunk]:
    async for request in requests:
        yield messages.parse_chunk(request)
