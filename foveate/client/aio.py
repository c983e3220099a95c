"""The async client: the sync one's names with `await`, on gRPC's asyncio API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foveate.client import upload
from foveate.client.failures import reached, resume_after_s
from foveate.client.messages import (
    AnswersBuilder,
    ContextBuilder,
    ask_request,
    check_one_answer,
    context_from_proto,
    context_name,
    list_request,
    server_info_from_proto,
    watch_request,
)
from foveate.client.sync import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, PAGE_SIZE
from foveate.client.types import Answer, AskOptions, Context, ContextState, Delta, ProgressCallback, ServerInfo
from foveate.rpc.channel import open_channel
from foveate.rpc.errors import STATUS_LOST, FoveateError, from_rpc_error
from foveate.rpc.security import ClientTls
from foveate.v1 import answers_pb2, answers_pb2_grpc, contexts_pb2, contexts_pb2_grpc

_LISTEN_S = 0.5


class AsyncClient:
    """Asks a gateway at `address` ("host:port"). `timeout_s` is the deadline of calls that do not name their own.

    `tls` encrypts (None: plaintext), `api_key` tells the server who asks. A trace that is current is handed on.

    Connects on the first call and belongs to the event loop that made it. Every method raises FoveateError.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self.address = address
        self._api_key = api_key
        self._tls = tls
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection, and with it the answers that still stream; a later call opens it again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def create_context(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        server_path: str | None = None,
        fps: float | None = None,
        max_frames: int | None = None,
        request_id: str | None = None,
        on_progress: ProgressCallback | None = None,
        timeout_s: float | None = None,
    ) -> Context:
        """Uploads the file at `path`, or names one below the server's media root, and waits until it is prefilled."""
        source = upload.from_path_or_server_path(path, server_path, fps=fps, max_frames=max_frames)
        source.name_request(request_id)
        return await self._create(source, on_progress, timeout_s)

    async def create_context_from_bytes(
        self,
        data: bytes,
        *,
        filename: str = "",
        fps: float | None = None,
        max_frames: int | None = None,
        stored_fps: float | None = None,
        request_id: str | None = None,
        on_progress: ProgressCallback | None = None,
        timeout_s: float | None = None,
    ) -> Context:
        """Uploads a video file's bytes and waits until it is prefilled; `filename` is only used in messages.

        JPEGs one behind another are a video of `stored_fps` frames per second; one alone is a still image.
        """
        source = upload.from_bytes(data, filename=filename, fps=fps, max_frames=max_frames, stored_fps=stored_fps)
        source.name_request(request_id)
        return await self._create(source, on_progress, timeout_s)

    async def get_context(self, context: Context | str, *, timeout_s: float | None = None) -> Context:
        """Returns a context, in memory or cold. Raises NotFound when the server has it no more."""
        request = contexts_pb2.GetContextRequest(name=context_name(context))
        with reached(self.address):
            response = await self._contexts().GetContext(request, timeout=self._deadline_s(timeout_s))
        return context_from_proto(response.context)

    async def list_contexts(
        self, *, state: ContextState | None = None, media_sha256: str = "", timeout_s: float | None = None
    ) -> list[Context]:
        """Returns the caller's contexts, newest first: all, those in one state, or those of one video file."""
        found: list[Context] = []
        token = ""
        while True:
            request = list_request(state, media_sha256, page_size=PAGE_SIZE, page_token=token)
            with reached(self.address):
                response = await self._contexts().ListContexts(request, timeout=self._deadline_s(timeout_s))
            found.extend(context_from_proto(message) for message in response.contexts)
            token = response.next_page_token
            if not token:
                return found

    async def delete_context(self, context: Context | str, *, timeout_s: float | None = None) -> None:
        """Frees a context's memory and deletes its cold copies. Raises NotFound when the server has it no more."""
        request = contexts_pb2.DeleteContextRequest(name=context_name(context))
        with reached(self.address):
            await self._contexts().DeleteContext(request, timeout=self._deadline_s(timeout_s))

    async def watch_context(
        self,
        *,
        request_id: str | None = None,
        context: Context | str | None = None,
        on_progress: ProgressCallback | None = None,
        timeout_s: float | None = None,
    ) -> Context:
        """Waits for a creation, named by its request or its context, to end; returns its context. Raises NotFound."""
        request = watch_request(request_id, context)
        builder = ContextBuilder()
        with reached(self.address):
            async for response in self._contexts().WatchContext(request, timeout=self._deadline_s(timeout_s)):
                progress = builder.feed(response)
                if progress is not None and on_progress is not None:
                    on_progress(progress)
        return builder.result()

    async def touch_context(
        self, context: Context | str, *, pinned: bool | None = None, timeout_s: float | None = None
    ) -> Context:
        """Puts a context's expiry off; `pinned` keeps it for good, or no longer. Raises NotFound."""
        request = contexts_pb2.TouchContextRequest(name=context_name(context), pinned=pinned)
        with reached(self.address):
            response = await self._contexts().TouchContext(request, timeout=self._deadline_s(timeout_s))
        return context_from_proto(response.context)

    async def ask(self, context: Context | str, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Returns the whole answer."""
        check_one_answer(options)
        async with self.stream(context, question, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    async def ask_n(self, context: Context | str, question: str, **options: Unpack[AskOptions]) -> tuple[Answer, ...]:
        """Returns `n` whole answers, each sampled with a seed of its own; `temperature` must be above 0."""
        async with self.stream(context, question, **options) as stream:
            async for _ in stream:
                pass
            return stream.results

    def stream(self, context: Context | str, question: str, **options: Unpack[AskOptions]) -> AsyncAnswerStream:
        """Starts an answer: iterate for its deltas, then read `result`. Leaving it early frees everything it holds."""
        request = ask_request(context, question, options)
        stub = answers_pb2_grpc.AnswerServiceStub(self._open())
        call = stub.Ask(request, timeout=self._deadline_s(options.get("timeout_s")))
        return AsyncAnswerStream(call, AnswersBuilder(request), self.address)

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Returns what is served."""
        stub = answers_pb2_grpc.AnswerServiceStub(self._open())
        with reached(self.address):
            response = await stub.GetServerInfo(answers_pb2.GetServerInfoRequest(), timeout=self._deadline_s(timeout_s))
        return server_info_from_proto(response)

    async def is_serving(self, *, timeout_s: float = 5.0) -> bool:
        """Returns whether the server's health is SERVING; an unreachable one's is not."""
        stub: Any = health_pb2_grpc.HealthStub(self._open())
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _create(
        self, source: upload.ContextSource, on_progress: ProgressCallback | None, timeout_s: float | None
    ) -> Context:
        num_resumes = 0
        with source:
            while True:
                try:
                    return await self._create_once(source, on_progress, timeout_s)
                except FoveateError as error:
                    wait_s = resume_after_s(error, source, num_resumes)
                    if wait_s is None:
                        raise
                await asyncio.sleep(wait_s)
                num_resumes += 1
                source.resume()

    async def _create_once(
        self, source: upload.ContextSource, on_progress: ProgressCallback | None, timeout_s: float | None
    ) -> Context:
        with reached(self.address, source):
            try:
                return await self._upload(source, on_progress, timeout_s)
            except grpc.aio.AioRpcError as error:
                if source.can_resume or from_rpc_error(error).reason != STATUS_LOST:
                    raise
            # A server refused while a chunk was being written, and grpc.aio lost why: ask again, and listen first.
            source.rewind()
            return await self._upload(source, on_progress, timeout_s, listen_s=_LISTEN_S)

    async def _upload(
        self,
        source: upload.ContextSource,
        on_progress: ProgressCallback | None,
        timeout_s: float | None,
        *,
        listen_s: float = 0.0,
    ) -> Context:
        builder = ContextBuilder()
        call = self._contexts().CreateContext(_requests(source, listen_s), timeout=self._deadline_s(timeout_s))
        try:
            async for response in call:
                progress = builder.feed(response)
                if progress is not None:
                    source.heard(progress)
                if progress is not None and on_progress is not None:
                    on_progress(progress)
        except asyncio.CancelledError:
            if source.error is not None:
                raise source.error from None
            raise
        finally:
            call.cancel()
        return builder.result()

    def _contexts(self) -> contexts_pb2_grpc.ContextServiceAsyncStub:
        return contexts_pb2_grpc.ContextServiceStub(self._open())

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = open_channel(self.address, self._tls, api_key=self._api_key)
        return self._channel

    def _deadline_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s


async def _requests(source: upload.ContextSource, listen_s: float) -> AsyncIterator[contexts_pb2.CreateContextRequest]:
    while (request := await asyncio.to_thread(source.next_request)) is not None:
        yield request
        await asyncio.sleep(listen_s)
        listen_s = 0.0


class AsyncAnswerStream(AsyncIterator[Delta]):
    """An answer as it comes. As an async context manager, leaving the block early cancels the answer."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[answers_pb2.AskRequest, answers_pb2.AskResponse],
        builder: AnswersBuilder,
        address: str,
    ) -> None:
        self._call = call
        self._builder = builder
        self._address = address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    async def __anext__(self) -> Delta:
        with reached(self._address):
            async for response in self._call:
                delta = self._builder.feed(response)
                if delta is not None:
                    return delta
        raise StopAsyncIteration

    @property
    def result(self) -> Answer:
        """The whole answer, once the deltas were iterated to their end. Raises Internal before that."""
        return self._builder.result()

    @property
    def results(self) -> tuple[Answer, ...]:
        """All `n` whole answers, in order, once the deltas were iterated to their end. Raises Internal before that."""
        return self._builder.results()

    def cancel(self) -> None:
        """Stops the answer; the server frees what it holds. Harmless after the end."""
        self._call.cancel()
