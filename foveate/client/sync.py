"""The sync client. It uses gRPC's sync API, so it works wherever Python does, a running event loop included."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from types import TracebackType
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
from foveate.client.types import Answer, AskOptions, Context, ContextState, Delta, ProgressCallback, ServerInfo
from foveate.rpc.channel import open_sync_channel
from foveate.rpc.errors import FoveateError
from foveate.rpc.security import ClientTls
from foveate.v1 import answers_pb2, answers_pb2_grpc, contexts_pb2, contexts_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:8080"
DEFAULT_TIMEOUT_S = 600.0
PAGE_SIZE = 1000


class Client:
    """Asks a gateway at `address` ("host:port"). `timeout_s` is the deadline of calls that do not name their own.

    `tls` encrypts (None: plaintext), `api_key` tells the server who asks. A trace that is current is handed on.

    Connects on the first call, and again in a forked process, so a client may be made before workers are forked.
    Threads may share it. Every method raises FoveateError.
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
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._channel_pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection, and with it the answers that still stream; a later call opens it again."""
        with self._lock:
            if self._channel is not None and self._channel_pid == os.getpid():
                self._channel.close()
            self._channel = None

    def create_context(
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
        """Uploads the file at `path`, or names one below the server's media root, and waits until it is prefilled.

        `fps` and `max_frames` say which frames are looked at. `on_progress` is called in the calling thread.
        """
        source = upload.from_path_or_server_path(path, server_path, fps=fps, max_frames=max_frames)
        source.name_request(request_id)
        return self._create(source, on_progress, timeout_s)

    def create_context_from_bytes(
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
        return self._create(source, on_progress, timeout_s)

    def get_context(self, context: Context | str, *, timeout_s: float | None = None) -> Context:
        """Returns a context, in memory or cold. Raises NotFound when the server has it no more."""
        request = contexts_pb2.GetContextRequest(name=context_name(context))
        with reached(self.address):
            response = self._contexts().GetContext(request, timeout=self._deadline_s(timeout_s))
        return context_from_proto(response.context)

    def list_contexts(
        self, *, state: ContextState | None = None, media_sha256: str = "", timeout_s: float | None = None
    ) -> list[Context]:
        """Returns the caller's contexts, newest first: all, those in one state, or those of one video file."""
        found: list[Context] = []
        token = ""
        while True:
            request = list_request(state, media_sha256, page_size=PAGE_SIZE, page_token=token)
            with reached(self.address):
                response = self._contexts().ListContexts(request, timeout=self._deadline_s(timeout_s))
            found.extend(context_from_proto(message) for message in response.contexts)
            token = response.next_page_token
            if not token:
                return found

    def delete_context(self, context: Context | str, *, timeout_s: float | None = None) -> None:
        """Frees a context's memory and deletes its cold copies. Raises NotFound when the server has it no more."""
        request = contexts_pb2.DeleteContextRequest(name=context_name(context))
        with reached(self.address):
            self._contexts().DeleteContext(request, timeout=self._deadline_s(timeout_s))

    def watch_context(
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
            for response in self._contexts().WatchContext(request, timeout=self._deadline_s(timeout_s)):
                progress = builder.feed(response)
                if progress is not None and on_progress is not None:
                    on_progress(progress)
        return builder.result()

    def touch_context(
        self, context: Context | str, *, pinned: bool | None = None, timeout_s: float | None = None
    ) -> Context:
        """Puts a context's expiry off; `pinned` keeps it for good, or no longer. Raises NotFound."""
        request = contexts_pb2.TouchContextRequest(name=context_name(context), pinned=pinned)
        with reached(self.address):
            response = self._contexts().TouchContext(request, timeout=self._deadline_s(timeout_s))
        return context_from_proto(response.context)

    def ask(self, context: Context | str, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Returns the whole answer."""
        check_one_answer(options)
        with self.stream(context, question, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def ask_n(self, context: Context | str, question: str, **options: Unpack[AskOptions]) -> tuple[Answer, ...]:
        """Returns `n` whole answers, each sampled with a seed of its own; `temperature` must be above 0."""
        with self.stream(context, question, **options) as stream:
            return stream.results

    def stream(self, context: Context | str, question: str, **options: Unpack[AskOptions]) -> AnswerStream:
        """Starts an answer: iterate for its deltas, then read `result`. Leaving it early frees everything it holds."""
        request = ask_request(context, question, options)
        stub = answers_pb2_grpc.AnswerServiceStub(self._open())
        call = stub.Ask(request, timeout=self._deadline_s(options.get("timeout_s")))
        return AnswerStream(call, AnswersBuilder(request), self.address)

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Returns what is served."""
        stub = answers_pb2_grpc.AnswerServiceStub(self._open())
        with reached(self.address):
            response = stub.GetServerInfo(answers_pb2.GetServerInfoRequest(), timeout=self._deadline_s(timeout_s))
        return server_info_from_proto(response)

    def is_serving(self, *, timeout_s: float = 5.0) -> bool:
        """Returns whether the server's health is SERVING; an unreachable one's is not."""
        stub: Any = health_pb2_grpc.HealthStub(self._open())
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _create(
        self, source: upload.ContextSource, on_progress: ProgressCallback | None, timeout_s: float | None
    ) -> Context:
        num_resumes = 0
        with source:
            while True:
                try:
                    return self._create_once(source, on_progress, timeout_s)
                except FoveateError as error:
                    wait_s = resume_after_s(error, source, num_resumes)
                    if wait_s is None:
                        raise
                time.sleep(wait_s)
                num_resumes += 1
                source.resume()

    def _create_once(
        self, source: upload.ContextSource, on_progress: ProgressCallback | None, timeout_s: float | None
    ) -> Context:
        builder = ContextBuilder()
        with reached(self.address, source):
            call = self._contexts().CreateContext(source.requests(), timeout=self._deadline_s(timeout_s))
            with contextlib.ExitStack() as cleanup:
                cleanup.callback(call.cancel)
                for response in call:
                    progress = builder.feed(response)
                    if progress is not None:
                        source.heard(progress)
                    if progress is not None and on_progress is not None:
                        on_progress(progress)
        return builder.result()

    def _contexts(self) -> contexts_pb2_grpc.ContextServiceStub:
        return contexts_pb2_grpc.ContextServiceStub(self._open())

    def _open(self) -> grpc.Channel:
        with self._lock:
            if self._channel is None or self._channel_pid != os.getpid():
                self._channel = open_sync_channel(self.address, self._tls, api_key=self._api_key)
                self._channel_pid = os.getpid()
            return self._channel

    def _deadline_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s


class AnswerStream(Iterator[Delta]):
    """An answer as it comes. As a context manager, leaving the block early cancels the answer."""

    def __init__(self, call: Any, builder: AnswersBuilder, address: str) -> None:
        self._call = call
        self._builder = builder
        self._address = address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def __next__(self) -> Delta:
        with reached(self._address), self._cancelling_on_interrupt():
            for response in self._call:
                delta = self._builder.feed(response)
                if delta is not None:
                    return delta
        raise StopIteration

    @property
    def result(self) -> Answer:
        """The whole answer; reads what is left of the stream first."""
        for _ in self:
            pass
        return self._builder.result()

    @property
    def results(self) -> tuple[Answer, ...]:
        """All `n` whole answers, in order; reads what is left of the stream first."""
        for _ in self:
            pass
        return self._builder.results()

    def cancel(self) -> None:
        """Stops the answer; the server frees what it holds. Harmless after the end."""
        self._call.cancel()

    @contextlib.contextmanager
    def _cancelling_on_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.cancel()
            raise
