"""The public services: parse, call, encode."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc

from foveate.v1 import answers_pb2, answers_pb2_grpc, contexts_pb2, contexts_pb2_grpc
from gateway import validation
from gateway.backends import Backends
from gateway.codec import answers as answer_codec
from gateway.codec import contexts as context_codec
from gateway.context_cache import ContextCache
from gateway.conversations import begin
from gateway.exchange import Deadline
from gateway.facts import ContextSpec, MediaChunk
from gateway.observing import ObservedAnswer, Observer
from gateway.outbox import Outbox
from gateway.policies import build_policy
from gateway.rounds import Stages, answer
from gateway.samples import Forks, all_of, each_of
from gateway.statistics import Statistics
from gateway.tenants import Tenants
from gateway.values import Question

ServicerContext = grpc.aio.ServicerContext[Any, Any]


class AnswerServicer(answers_pb2_grpc.AnswerServiceServicer):
    """AnswerService."""

    def __init__(self, backends: Backends, observer: Observer, tenants: Tenants) -> None:
        self._backends = backends
        self._observer = observer
        self._tenants = tenants

    # Writes by itself rather than yielding, so that a cancellation always arrives inside the answer and ends it there.
    async def Ask(self, request: answers_pb2.AskRequest, context: ServicerContext) -> None:  # type: ignore[override]
        """Streams an answer."""
        stats, deadline = Statistics(), _deadline(context)
        with self._observer.answer(request.context) as observed:
            served = self._backends.for_answers()
            tenant = self._tenants.of(context)
            begun = await begin(answer_codec.ask_fields(request), tenant, self._backends.registry)
            question = replace(
                validation.parse_question(begun.fields, served.limits),
                tenant=tenant,
                keep_thread=begun.conversation is not None,
            )
            drafts = self._backends.drafters.plan(question.drafting, deadline=deadline, vocab_size=served.vocab_size)
            policy = build_policy(question.acceptance, served.vocabulary)
            signals = policy.signals
            if request.explain:
                signals = signals.with_all(has_relevance=served.info.relevance is not None)
            if question.num_top_logprobs is not None:
                signals = signals.with_logprobs(question.num_top_logprobs)
            planned = replace(question, drafting=drafts.drafting, signals=signals)
            encode = functools.partial(
                answer_codec.event_to_proto,
                explain=request.explain,
                logprobs=request.logprobs,
                text_of=served.vocabulary.text_of,
            )
            if planned.num_answers > 1:
                stages = Stages(replace(served, opener=Forks(served.opener)), drafts, policy, deadline)
                async with Outbox(context.write) as outbox:
                    await self._answer_each(planned, stages, stats, observed, outbox, encode)
                return
            stages, stats = observed.begin(planned, Stages(served, drafts, policy, deadline), stats)
            async with (
                Outbox(context.write) as outbox,
                contextlib.aclosing(begun.kept(answer(planned, stages, stats))) as events,
            ):
                async for event in events:
                    observed.see(event, stats)
                    await outbox.put(encode(event))

    async def _answer_each(
        self,
        planned: Question,
        stages: Stages,
        stats: Statistics,
        observed: ObservedAnswer,
        outbox: Outbox,
        encode: Callable[..., answers_pb2.AskResponse],
    ) -> None:
        """Streams several answers side by side; of the first the rounds are traced as well."""
        writing = asyncio.Lock()

        async def run(index: int, question: Question, on: Stages, counts: Statistics, seen: ObservedAnswer) -> None:
            async with contextlib.aclosing(answer(question, on, counts)) as events:
                async for event in events:
                    seen.see(event, counts)
                    async with writing:
                        await outbox.put(encode(event, index=index))

        async def run_beside(index: int, question: Question) -> None:
            with self._observer.answer(question.context) as beside:
                beside.answers_with(stages)
                await run(index, question, stages, Statistics(), beside)

        first, *others = each_of(planned)
        of_first = run(0, first, *observed.begin(first, stages, stats), observed)
        await all_of([of_first, *(run_beside(index, one) for index, one in enumerate(others, start=1))])

    async def GetServerInfo(
        self, request: answers_pb2.GetServerInfoRequest, context: ServicerContext
    ) -> answers_pb2.GetServerInfoResponse:
        """Tells what is served."""
        return answer_codec.server_info_to_proto(await self._backends.server_info())


class ContextServicer(contexts_pb2_grpc.ContextServiceServicer):
    """ContextService."""

    def __init__(self, backends: Backends, tenants: Tenants) -> None:
        self._backends = backends
        self._tenants = tenants

    async def CreateContext(  # type: ignore[override]
        self, request_iterator: AsyncIterator[contexts_pb2.CreateContextRequest], context: ServicerContext
    ) -> None:
        """Makes a context."""
        events = self._contexts(context).create(_parts(request_iterator), _deadline(context))
        async with contextlib.aclosing(events):
            async for event in events:
                await context.write(context_codec.prefill_event_to_proto(event))

    async def GetContext(
        self, request: contexts_pb2.GetContextRequest, context: ServicerContext
    ) -> contexts_pb2.GetContextResponse:
        """Returns a context."""
        name = validation.check_context_name("name", request.name)
        held = await self._contexts(context).get(name, _deadline(context))
        return contexts_pb2.GetContextResponse(context=context_codec.context_to_proto(held))

    async def ListContexts(
        self, request: contexts_pb2.ListContextsRequest, context: ServicerContext
    ) -> contexts_pb2.ListContextsResponse:
        """Returns a page of contexts."""
        page_size = validation.check_page_size(request.page_size)
        wanted = context_codec.context_filter(request)
        page = await self._contexts(context).list(page_size, request.page_token, wanted, _deadline(context))
        held = [context_codec.context_to_proto(one) for one in page.contexts]
        return contexts_pb2.ListContextsResponse(contexts=held, next_page_token=page.next_page_token)

    async def DeleteContext(
        self, request: contexts_pb2.DeleteContextRequest, context: ServicerContext
    ) -> contexts_pb2.DeleteContextResponse:
        """Frees a context."""
        name = validation.check_context_name("name", request.name)
        await self._contexts(context).delete(name, _deadline(context))
        return contexts_pb2.DeleteContextResponse()

    async def WatchContext(  # type: ignore[override]
        self, request: contexts_pb2.WatchContextRequest, context: ServicerContext
    ) -> None:
        """Streams the progress of a creation, and then its context."""
        request_id, name = validation.check_watch(request.WhichOneof("target"), request.request_id, request.name)
        events = self._contexts(context).watch(_deadline(context), request_id=request_id, name=name)
        async with contextlib.aclosing(events):
            async for event in events:
                await context.write(context_codec.watch_event_to_proto(event))

    async def TouchContext(
        self, request: contexts_pb2.TouchContextRequest, context: ServicerContext
    ) -> contexts_pb2.TouchContextResponse:
        """Puts a context's expiry off, and pins or unpins it."""
        name = validation.check_context_name("name", request.name)
        pinned = request.pinned if request.HasField("pinned") else None
        touched = await self._contexts(context).touch(name, _deadline(context), pinned=pinned)
        return contexts_pb2.TouchContextResponse(context=context_codec.context_to_proto(touched))

    def _contexts(self, context: ServicerContext) -> ContextCache:
        return ContextCache(self._backends.verifiers, self._backends.served().limits, self._tenants.of(context))


def _deadline(context: ServicerContext) -> Deadline:
    return Deadline.after(context.time_remaining())


async def _parts(
    requests: AsyncIterator[contexts_pb2.CreateContextRequest],
) -> AsyncIterator[ContextSpec | MediaChunk | None]:
    async for request in requests:
        yield context_codec.upload_part(request)
