"""DrafterService: parse, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from drafter_svc.drafter import Drafter, OpenSequence
from drafter_svc.messages import drafted_message, info_message, opened_message, parse_open, parse_round
from foveate.rpc.errors import Unavailable, invalid
from foveate.v1 import drafter_pb2, drafter_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers UNAVAILABLE until `serve` is called."""

    def __init__(self) -> None:
        self._drafter: Drafter | None = None

    def serve(self, drafter: Drafter) -> None:
        """Answers with `drafter` from now on."""
        self._drafter = drafter

    async def GetDrafterInfo(
        self, request: drafter_pb2.GetDrafterInfoRequest, context: Context
    ) -> drafter_pb2.GetDrafterInfoResponse:
        return info_message(self._loaded())

    async def Draft(
        self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Context
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        async for request in requests:
            if request.WhichOneof("payload") != "open":
                raise invalid("payload", "open must come first")
            drafter = self._loaded()
            async with drafter.sequence(parse_open(request.open, vocab_size=drafter.vocab_size)) as sequence:
                yield opened_message(request.request_id, sequence.opened)
                async for response in _rounds(sequence, requests):
                    yield response

    def _loaded(self) -> Drafter:
        if self._drafter is None:
            raise Unavailable("the drafter is loading", reason="LOADING", retry_after_s=1.0)
        return self._drafter


async def _rounds(
    sequence: OpenSequence, requests: AsyncIterator[drafter_pb2.DraftRequest]
) -> AsyncIterator[drafter_pb2.DraftResponse]:
    async for request in requests:
        if request.WhichOneof("payload") != "round":
            raise invalid("payload", "must be a round: the sequence is open")
        draft = await sequence.draft(parse_round(request.round))
        yield drafted_message(request.request_id, draft)
