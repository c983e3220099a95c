"""The public services: parse, call, encode."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from foveate.v1 import answers_pb2, answers_pb2_grpc, contexts_pb2, contexts_pb2_grpc
from gateway import validation
from gateway.backends import Backends
from gateway.codec import answers as answer_codec
from gateway.codec import contexts as context_codec
from gateway.context_cache import ContextCache
from gateway.exchange import Deadline
from gateway.facts import ContextSpec, MediaChunk
from gateway.policies import Policy
from gateway.rounds import Stages, answer
from gateway.statistics import Statistics

ServicerContext = grpc.aio.ServicerContext[Any, Any]


class AnswerServicer(answers_pb2_grpc.AnswerServiceServicer):
    """AnswerService."""

    def __init__(self, backends: Backends, policy: Policy) -> None:
        self._backends = backends
        self._policy = policy

    # Writes by itself rather than yielding, so that a cancellation always arrives inside the answer and ends it there.
    async def Ask(self, request: answers_pb2.AskRequest, context: ServicerContext) -> None:  # type: ignore[override]
        """Streams an answer."""
        stats, deadline = Statistics(), _deadline(context)
        served = self._backends.served()
        question = validation.parse_question(answer_codec.ask_fields(request), served.limits)
        drafts = self._backends.drafters.plan(question.drafting, deadline=deadline, vocab_size=served.vocab_size)
        stages = Stages(served, drafts, self._policy, deadline)
        events = answer(replace(question, drafting=drafts.drafting), stages, stats)
        async with contextlib.aclosing(events):
            async for event in events:
                await context.write(answer_codec.event_to_proto(event, explain=request.explain))

    async def GetServerInfo(
        self, request: answers_pb2.GetServerInfoRequest, context: ServicerContext
    ) -> answers_pb2.GetServerInfoResponse:
        """Tells what is served."""
        return answer_codec.server_info_to_proto(await self._backends.server_info())


class ContextServicer(contexts_pb2_grpc.ContextServiceServicer):
    """ContextService."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    async def CreateContext(  # type: ignore[override]
        self, request_iterator: AsyncIterator[contexts_pb2.CreateContextRequest], context: ServicerContext
    ) -> None:
        """Makes a context."""
        events = self._contexts().create(_parts(request_iterator), _deadline(context))
        async with contextlib.aclosing(events):
            async for event in events:
                await context.write(context_codec.prefill_event_to_proto(event))

    async def GetContext(
        self, request: contexts_pb2.GetContextRequest, context: ServicerContext
    ) -> contexts_pb2.GetContextResponse:
        """Returns a context."""
        name = validation.check_context_name("name", request.name)
        held = await self._contexts().get(name, _deadline(context))
        return contexts_pb2.GetContextResponse(context=context_codec.context_to_proto(held))

    async def ListContexts(
        self, request: contexts_pb2.ListContextsRequest, context: ServicerContext
    ) -> contexts_pb2.ListContextsResponse:
        """Returns a page of contexts."""
        page_size = validation.check_page_size(request.page_size)
        page = await self._contexts().list(page_size, request.page_token, _deadline(context))
        held = [context_codec.context_to_proto(one) for one in page.contexts]
        return contexts_pb2.ListContextsResponse(contexts=held, next_page_token=page.next_page_token)

    async def DeleteContext(
        self, request: contexts_pb2.DeleteContextRequest, context: ServicerContext
    ) -> contexts_pb2.DeleteContextResponse:
        """Frees a context."""
        name = validation.check_context_name("name", request.name)
        await self._contexts().delete(name, _deadline(context))
        return contexts_pb2.DeleteContextResponse()

    def _contexts(self) -> ContextCache:
        served = self._backends.served()
        return ContextCache(served.verifier, served.limits)


def _deadline(context: ServicerContext) -> Deadline:
    return Deadline.after(context.time_remaining())


async def _parts(
    requests: AsyncIterator[contexts_pb2.CreateContextRequest],
) -> AsyncIterator[ContextSpec | MediaChunk | None]:
    async for request in requests:
        yield context_codec.upload_part(request)
