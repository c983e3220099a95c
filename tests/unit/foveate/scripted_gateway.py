"""A gateway that follows a script, served for real: what the client's and the CLI's own tests talk to."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from typing import Any

from foveate.rpc.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable, invalid
from foveate.rpc.server import Server, ServiceRegistration, running
from foveate.v1 import answers_pb2, answers_pb2_grpc, contexts_pb2, contexts_pb2_grpc

A, R, B, P = (
    answers_pb2.TOKEN_ORIGIN_ACCEPTED,
    answers_pb2.TOKEN_ORIGIN_RECOVERED,
    answers_pb2.TOKEN_ORIGIN_BONUS,
    answers_pb2.TOKEN_ORIGIN_PLAIN,
)


def _is_wanted(held: contexts_pb2.Context, state: int, media_sha256: str) -> bool:
    return state in (0, held.state) and media_sha256 in ("", held.media_sha256)


class ScriptedContexts(contexts_pb2_grpc.ContextServiceServicer):
    """Keeps uploads by hash; sees to it that chunks are in order and at most 1 MiB."""

    def __init__(self) -> None:
        self.held: dict[str, contexts_pb2.Context] = {}
        self.specs: list[contexts_pb2.ContextSpec] = []
        self.max_upload_bytes = 64 * 1024 * 1024
        self.break_after_bytes: list[int] = []  # of each upload in turn: then the connection is lost
        self.kept: dict[str, bytes] = {}
        self.num_received_bytes = 0

    async def CreateContext(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        data = b""
        async for request in request_iterator:
            if request.WhichOneof("payload") == "spec":
                self._take_spec(request.spec)
                data = self.kept.get(request.spec.request_id, b"")
                if request.spec.request_id in self.kept:
                    yield _progress(contexts_pb2.CONTEXT_STAGE_UPLOAD, len(data), request.spec.upload.total_bytes)
                continue
            if request.chunk.write_offset != len(data) or len(request.chunk.data) > 2**20:
                raise invalid("chunk.write_offset", f"must be {len(data)}")
            data += request.chunk.data
            self.num_received_bytes += len(request.chunk.data)
            if self.break_after_bytes and len(data) >= self.break_after_bytes[0]:
                del self.break_after_bytes[0]
                self.kept[self.specs[-1].request_id] = data
                raise Unavailable("the verifier is not available", reason="VERIFIER_LOST")
            yield _progress(contexts_pb2.CONTEXT_STAGE_UPLOAD, len(data), self.specs[-1].upload.total_bytes)
        if data == b"slow":
            await asyncio.sleep(60)
        for stage in (2, 3, 4):
            yield _progress(stage, 4, 4)
        name = f"contexts/{hashlib.sha256(data or self.specs[-1].path.encode()).hexdigest()}"
        is_reused = name in self.held
        self.held[name] = _context(name)
        yield contexts_pb2.CreateContextResponse(context=_context(name, is_reused))

    def _take_spec(self, spec: contexts_pb2.ContextSpec) -> None:
        self.specs.append(spec)
        if spec.upload.total_bytes > self.max_upload_bytes:
            raise ResourceExhausted(f"upload of {spec.upload.total_bytes} bytes, limit {self.max_upload_bytes}")
        if spec.path.startswith("/"):
            raise invalid("path", "must lie below the media root")
        if spec.path == "missing.mp4":
            raise NotFound("no file at missing.mp4", resource=("file", "missing.mp4"))

    async def GetContext(self, request: Any, context: Any) -> Any:
        return contexts_pb2.GetContextResponse(context=self._find(request.name))

    async def ListContexts(self, request: Any, context: Any) -> Any:
        wanted = (request.state, request.media_sha256)
        names = sorted(name for name, held in self.held.items() if _is_wanted(held, *wanted))
        at = int(request.page_token or 0)
        next_token = str(at + 2) if at + 2 < len(names) else ""  # pages of two, whatever was asked
        return contexts_pb2.ListContextsResponse(
            contexts=[self.held[name] for name in names[at : at + 2]], next_page_token=next_token
        )

    async def WatchContext(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.request_id not in ("", "r1"):
            raise NotFound("no such request", resource=("request", request.request_id))
        yield contexts_pb2.WatchContextResponse(
            progress=contexts_pb2.ContextProgress(stage=contexts_pb2.CONTEXT_STAGE_DECODE, done=1, total=4)
        )
        yield contexts_pb2.WatchContextResponse(context=_context(request.name or "contexts/watched"))

    async def TouchContext(self, request: Any, context: Any) -> Any:
        held = self._find(request.name)
        held.pinned = request.pinned
        return contexts_pb2.TouchContextResponse(context=held)

    async def DeleteContext(self, request: Any, context: Any) -> Any:
        del self.held[self._find(request.name).name]
        return contexts_pb2.DeleteContextResponse()

    def _find(self, name: str) -> contexts_pb2.Context:
        if not name.startswith("contexts/"):
            raise invalid("name", "must be contexts/{id}")
        if name not in self.held:
            raise NotFound(f"no context {name}", resource=("context", name))
        return self.held[name]


class ScriptedAnswers(answers_pb2_grpc.AnswerServiceServicer):
    """Answers by question: "slow" never ends, "cut" ends without statistics, "" is refused, others are short."""

    def __init__(self) -> None:
        self.requests: list[answers_pb2.AskRequest] = []
        self.cancelled = threading.Event()

    async def Ask(self, request: answers_pb2.AskRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        if not request.question.strip():
            raise invalid("question", "must not be empty")
        if request.question == "full":
            raise ResourceExhausted("the KV pool is full", retry_after_s=0.5)
        if request.question == "hot":
            raise InvalidArgument("bad sampling", violations=invalid("sampling.temperature", "must be >= 0").violations)
        try:
            indices = range(request.n or 1)
            for index in indices:
                started = answers_pb2.AnswerStarted(num_prompt_tokens=40, num_cached_tokens=30)
                yield answers_pb2.AskResponse(started=started, index=index)
            for delta in _deltas(request):
                for index in indices:
                    yield answers_pb2.AskResponse(delta=delta, index=index)
            if request.question == "cut":
                return
            await asyncio.sleep(60 if request.question == "slow" else 0)
            for index in indices:
                yield answers_pb2.AskResponse(finished=_finished(request, index), index=index)
        except (asyncio.CancelledError, GeneratorExit):  # wherever the cancellation finds us: waiting, or at a yield
            self.cancelled.set()
            raise

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        limits = answers_pb2.ServerLimits(default_fps=2.0, max_draft_tokens=16)
        return answers_pb2.GetServerInfoResponse(
            version="0.1.0", model="tiny", kv_transport="shm", drafter_ready=True, device="cpu", limits=limits
        )


def _deltas(request: answers_pb2.AskRequest) -> list[answers_pb2.AnswerDelta]:
    texts = (("The ",), ("red ", "ball "), ("roll", "s."))
    origins = ((P,), (A, R), (A, B))
    deltas, next_id = [], 1
    for pieces, whence in zip(texts, origins, strict=True):
        ids = list(range(next_id, next_id + len(pieces)))
        next_id += len(pieces)
        told: dict[str, Any] = {"origins": whence, "token_texts": pieces} if request.explain else {}
        if request.logprobs:
            told["logprobs"] = [_logprobs(token_id, request.top_logprobs) for token_id in ids]
        deltas.append(answers_pb2.AnswerDelta(text="".join(pieces), token_ids=ids, **told))
    return deltas


def _logprobs(token_id: int, num_top: int) -> answers_pb2.TokenLogprobs:
    top = [answers_pb2.TopLogprob(token_id=rank, text=str(rank), logprob=-1.0 - rank) for rank in range(num_top)]
    return answers_pb2.TokenLogprobs(logprob=-token_id, top=top)


def _finished(request: answers_pb2.AskRequest, index: int) -> answers_pb2.AnswerFinished:
    return answers_pb2.AnswerFinished(
        finish_reason=answers_pb2.FINISH_REASON_EOS,
        guarantee=answers_pb2.GUARANTEE_LOSSLESS,
        num_prompt_tokens=40,
        num_output_tokens=5,
        seed=request.sampling.seed + index if request.sampling.temperature else None,
        notes=["the drafter was lost"] if request.question == "note" else [],
        stats=answers_pb2.AnswerStats(
            draft_mode=answers_pb2.DRAFT_MODE_SPARSE,
            num_rounds=2,
            num_draft_rounds=2,
            num_draft_tokens=10,
            num_accepted_tokens=3,
            num_accepted_tokens_per_pos=[2, 1],
            time_to_first_token_ms=12.0,
            decode_ms=100.0,
        ),
    )


def _progress(stage: Any, done: int, total: int) -> contexts_pb2.CreateContextResponse:
    return contexts_pb2.CreateContextResponse(
        progress=contexts_pb2.ContextProgress(stage=stage, done=done, total=total)
    )


def _context(name: str, reused: bool = False) -> contexts_pb2.Context:
    made = contexts_pb2.Context(name=name, num_visual_tokens=36, num_tokens=45, kv_bytes=2**20, reused=reused)
    made.create_time.FromSeconds(1_700_000_000)
    made.video.duration_s = 4.0
    made.video.num_frames = 8
    made.video.frame_timestamps_s.extend([0.0, 0.5])
    return made


class ScriptedGateway:
    """Serves the script on a free port, in a thread with an event loop of its own."""

    def __init__(self) -> None:
        self.contexts = ScriptedContexts()
        self.answers = ScriptedAnswers()
        self.address = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> ScriptedGateway:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        registrations = [
            ServiceRegistration(
                "foveate.v1.ContextService",
                lambda server: contexts_pb2_grpc.add_ContextServiceServicer_to_server(self.contexts, server),
            ),
            ServiceRegistration(
                "foveate.v1.AnswerService",
                lambda server: answers_pb2_grpc.add_AnswerServiceServicer_to_server(self.answers, server),
            ),
        ]
        async with running(Server(registrations, address="127.0.0.1:0"), grace_s=0) as server:
            await server.set_serving(True)
            self.address = f"127.0.0.1:{server.port}"
            self._started.set()
            await self._stopping.wait()
