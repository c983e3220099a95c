"""A verifier and a drafter without a model, as real gRPC services, for tests of everything around them.

The toy model follows a script: after the first n tokens of the script comes token n; after anything else comes a token
that is a hash of what came before. So a drafter that is wrong somewhere is really wrong afterwards, as with a model.
Both services hold rounds to the contract (compare-and-set on base_len) as strictly as the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import foveate
from foveate.rpc.channel import open_channel
from foveate.rpc.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from foveate.rpc.server import Server, ServiceRegistration, running
from foveate.v1 import (
    answers_pb2,
    answers_pb2_grpc,
    contexts_pb2,
    contexts_pb2_grpc,
    drafter_pb2,
    drafter_pb2_grpc,
    kv_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)
from gateway.backends import Backends, connected
from gateway.config import GatewayConfig
from gateway.main import make_server

EOS_TEXT = "<|im_end|>"
CONTEXT = "contexts/" + "ab" * 32
NUM_CONTEXT_TOKENS = 20
PROMPT_TEXT = "What does the red square do?"
_CORPUS = (
    "The red square moves left and then the blue circle moves right.",
    "A green triangle stands still while the red square turns.",
    "Übergröße façade naïve 北京の猫が好きです。 🙂🚀👩‍🚀 emoji",
)


@functools.cache
def toy_tokenizer() -> tokenizers.Tokenizer:
    """Returns a small byte-level BPE tokenizer: many characters outside ASCII take several tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[EOS_TEXT, "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def toy_eos() -> int:
    """Returns the id of the end-of-answer token."""
    return int(toy_tokenizer().token_to_id(EOS_TEXT))


def encode(text: str) -> tuple[int, ...]:
    """Returns the ids of a text."""
    return tuple(toy_tokenizer().encode(text).ids)


@dataclass(frozen=True)
class ToyModel:
    """A deterministic next-token function over a script."""

    script: tuple[int, ...]

    @classmethod
    def of(cls, text: str, *, eos: bool = True) -> ToyModel:
        """Returns the model that says `text` and then ends, or goes on with hashed tokens."""
        return cls((*encode(text), toy_eos()) if eos else encode(text))

    def next(self, answer: Sequence[int]) -> int:
        """Returns the token after the answer so far."""
        if len(answer) < len(self.script) and tuple(answer) == self.script[: len(answer)]:
            return self.script[len(answer)]
        digest = hashlib.blake2b(repr(list(answer[-8:])).encode(), digest_size=4).digest()
        return 2 + int.from_bytes(digest, "little") % (toy_tokenizer().get_vocab_size() - 2)

    def answer(self, max_tokens: int) -> tuple[int, ...]:
        """Returns plain decoding: at most `max_tokens` tokens, the end-of-answer token left out."""
        tokens: list[int] = []
        while len(tokens) < max_tokens and (token := self.next(tokens)) != toy_eos():
            tokens.append(token)
        return tuple(tokens)


FIRST_LOGPROB = -0.25


@dataclass
class _Rows:
    """A sequence as a service sees it: answer tokens by row, and the rounds that may come next.

    `before` are tokens of the answer that were there when the sequence opened: part of its prompt.
    """

    num_prompt_tokens: int
    before: tuple[int, ...] = ()
    answer: list[int] = field(default_factory=list)
    round: int = 0
    low: int = 0
    high: int = 0

    def __post_init__(self) -> None:
        self.low = self.high = self.num_prompt_tokens

    def advance(self, number: int, base_len: int, token_ids: Sequence[int]) -> None:
        """Truncates to base_len and appends. Raises FailedPrecondition when the round does not follow from the last."""
        if number != self.round + 1 or not token_ids or not self.low <= base_len <= self.high:
            raise FailedPrecondition(
                f"round {number} at {base_len} does not follow round {self.round} [{self.low}, {self.high}]",
                reason="BASE_LEN_MISMATCH",
            )
        self.round = number
        del self.answer[base_len - self.num_prompt_tokens :]
        self.answer.extend(token_ids)
        self.low = self.high = base_len + len(token_ids)

    @property
    def whole_answer(self) -> list[int]:
        return [*self.before, *self.answer]

    def speculate(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the next round may take back."""
        self.answer.extend(token_ids)
        self.high = self.low + len(token_ids)


@dataclass
class Streams:
    """What a service saw: how many streams and rounds, and when each stream ended."""

    num_opened: int = 0
    num_rounds: int = 0
    ended_at_s: list[float] = field(default_factory=list)

    @property
    def num_open(self) -> int:
        return self.num_opened - len(self.ended_at_s)

    @contextlib.contextmanager
    def stream(self) -> Any:
        self.num_opened += 1
        try:
            yield
        finally:
            self.ended_at_s.append(time.perf_counter())


class FakeVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """The verifier's contract over a toy model. Settings may be changed while it serves."""

    def __init__(self, model: ToyModel) -> None:
        self.model = model
        self.streams = Streams()
        self.opens: list[verifier_pb2.OpenSequence] = []
        self.is_context_lossy = False
        self.room: int | None = None  # rows for the answer; None: as many as asked for
        self.max_thread_tokens = 2000
        self.delay_s = 0.0
        self.die_in_round = 0
        self.die_in_open = False
        self.prefills: list[verifier_pb2.PrefillRequest] = []
        self.hang_in_round = 0
        self.is_silent = False  # takes calls, health checks too, and does not begin to answer them
        self.version = foveate.__version__
        self.pool_id = "toy"
        self.namespace = "here"  # of its shared memory
        self.contexts: dict[str, contexts_pb2.Context] = {}
        self.upload = bytearray()
        self.upload_gate: asyncio.Event | None = None  # a chunk is read only while it is set
        self.max_upload_bytes = 1 << 30
        self.add_context(CONTEXT, seconds=1)

    def add_context(self, name: str, *, seconds: int) -> contexts_pb2.Context:
        """Holds a context that was made `seconds` after the epoch."""
        context = contexts_pb2.Context(name=name, num_visual_tokens=16, num_tokens=NUM_CONTEXT_TOKENS, kv_bytes=1024)
        context.create_time.FromSeconds(seconds)
        context.video.frame_timestamps_s.extend([0.0, 0.5])
        self.contexts[name] = context
        return context

    def handle(self) -> kv_pb2.KvHandle:
        return _handle(self.pool_id, self.namespace)

    async def GetVerifierInfo(self, request: Any, context: Any) -> verifier_pb2.GetVerifierInfoResponse:
        tokenizer_json = toy_tokenizer().to_str().encode()
        return verifier_pb2.GetVerifierInfoResponse(
            version=self.version,
            model="toy",
            model_fingerprint="f" * 32,
            tokenizer_sha256=hashlib.sha256(tokenizer_json).hexdigest(),
            eos_token_ids=[toy_eos()],
            kv_handle=self.handle(),
            device="cpu",
            deterministic=True,
            attention_kernel="toy",
            limits=answers_pb2.ServerLimits(
                max_upload_bytes=self.max_upload_bytes,
                max_frames=100,
                max_visual_tokens=1000,
                max_thread_tokens=self.max_thread_tokens,
                max_draft_tokens=16,
                default_fps=2,
            ),
            pool_used_bytes=123,
            relevance=answers_pb2.RelevanceInfo(layer=6, at_predicting=True, num_nearest=8, quantiles=(0.0, 0.5, 1.0)),
            num_sequences=self.streams.num_open,
        )

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[verifier_pb2.GetTokenizerResponse]:
        data = toy_tokenizer().to_str().encode()
        for start in range(0, len(data), 1000):
            yield verifier_pb2.GetTokenizerResponse(data=data[start : start + 1000])

    async def ListHeldContexts(self, request: Any, context: Any) -> verifier_pb2.ListHeldContextsResponse:
        held = sorted(self.contexts.values(), key=lambda one: -one.create_time.seconds)
        held = [one for one in held if request.name in ("", one.name)]
        return verifier_pb2.ListHeldContextsResponse(contexts=held)

    async def ReleaseContext(self, request: Any, context: Any) -> verifier_pb2.ReleaseContextResponse:
        if self.contexts.pop(request.name, None) is None:
            raise NotFound(f"{request.name} is not held", resource=("context", request.name))
        return verifier_pb2.ReleaseContextResponse()

    async def TouchHeldContext(self, request: Any, context: Any) -> verifier_pb2.TouchHeldContextResponse:
        if request.name not in self.contexts:
            raise NotFound(f"{request.name} is not held", resource=("context", request.name))
        self.contexts[request.name].pinned = request.pinned
        return verifier_pb2.TouchHeldContextResponse(context=self.contexts[request.name])

    async def WatchPrefill(self, request: Any, context: Any) -> AsyncIterator[verifier_pb2.WatchPrefillResponse]:
        if request.request_id not in [one.spec.request_id for one in self.prefills]:
            raise NotFound("no such request", resource=("request", request.request_id))
        progress = contexts_pb2.ContextProgress(stage=contexts_pb2.CONTEXT_STAGE_PREFILL, done=1, total=1)
        yield verifier_pb2.WatchPrefillResponse(progress=progress)
        yield verifier_pb2.WatchPrefillResponse(context=next(iter(self.contexts.values())))

    async def Prefill(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.PrefillResponse]:
        self.upload.clear()
        with self.streams.stream():
            async for request in requests:
                if request.WhichOneof("payload") == "spec":
                    self.prefills.append(request)
                if request.WhichOneof("payload") == "chunk":
                    if self.upload_gate is not None:
                        await self.upload_gate.wait()
                    self.upload += request.chunk.data
                progress = contexts_pb2.ContextProgress(
                    stage=contexts_pb2.CONTEXT_STAGE_UPLOAD, done=len(self.upload), total=0
                )
                yield verifier_pb2.PrefillResponse(progress=progress)
            name = f"contexts/{hashlib.sha256(self.upload).hexdigest()}"
            reused = name in self.contexts
            made = self.contexts.get(name) or self.add_context(name, seconds=100 + len(self.contexts))
            made.reused = reused
            yield verifier_pb2.PrefillResponse(context=made, holder_pool_id=self.pool_id)

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        with self.streams.stream():
            rows, capacity, signals = _Rows(0), 0, verifier_pb2.Signals()
            async for request in requests:
                reply = verifier_pb2.VerifyResponse(request_id=request.request_id)
                if request.WhichOneof("payload") == "open":
                    reply.opened.CopyFrom(self._open(request.open))
                    rows = _Rows(reply.opened.num_prompt_tokens, tuple(request.open.answer_token_ids))
                    capacity = reply.opened.thread.capacity + NUM_CONTEXT_TOKENS
                    signals = request.open.signals
                else:
                    await self._trouble(request.round.round)
                    reply.verified.CopyFrom(self._verify(rows, capacity, request.round))
                    _measure(reply.verified, signals, len(request.round.draft_token_ids))
                yield reply

    async def _trouble(self, number: int) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if number == self.die_in_round:
            raise Unavailable("the verifier dies")
        if number == self.hang_in_round:
            await asyncio.Event().wait()

    def _open(self, request: verifier_pb2.OpenSequence) -> verifier_pb2.SequenceOpened:
        self.opens.append(request)
        if self.die_in_open:
            raise Unavailable("the verifier dies")
        if request.context not in self.contexts:
            raise NotFound(f"{request.context} is not held", resource=("context", request.context))
        prompt = encode(PROMPT_TEXT)
        room = request.max_tokens if self.room is None else self.room
        if room < 0:
            raise ResourceExhausted("the prompt does not fit", reason="THREAD_TOO_LONG")
        return verifier_pb2.SequenceOpened(
            sequence_id=f"s{self.streams.num_opened}",
            kv_handle=self.handle(),
            context=kv_pb2.KvSlab(offset_bytes=4096, capacity=NUM_CONTEXT_TOKENS),
            thread=kv_pb2.KvSlab(offset_bytes=8192, capacity=len(prompt) + len(request.answer_token_ids) + room),
            selection=kv_pb2.KvSelection(offset_bytes=16384, num_selected=4)
            if request.HasField("visual_budget")
            else None,
            num_context_tokens=NUM_CONTEXT_TOKENS,
            num_prompt_tokens=NUM_CONTEXT_TOKENS + len(prompt) + len(request.answer_token_ids),
            visual_spans=[kv_pb2.VisualSpan(start=2, num_tokens=16)],
            position_delta=-3,
            first_token_id=self.model.next(request.answer_token_ids),
            prompt_token_ids=prompt,
            prefill_us=1500,
            lossy_context=self.is_context_lossy,
            first_log_probability=FIRST_LOGPROB if request.signals.log_probabilities else None,
            first_top=_top(request.signals) if request.signals.num_top_log_probabilities else None,
        )

    def _verify(self, rows: _Rows, capacity: int, request: verifier_pb2.VerifyRound) -> verifier_pb2.RoundVerified:
        self.streams.num_rounds += 1
        rows.advance(request.round, request.base_len, request.token_ids)
        if request.base_len + len(request.token_ids) + len(request.draft_token_ids) > capacity:
            raise ResourceExhausted("the draft does not fit in the thread")
        targets = [self.model.next(rows.whole_answer)]
        for token_id in request.draft_token_ids:
            rows.speculate([token_id])
            targets.append(self.model.next(rows.whole_answer))
        rows.high = rows.low + len(request.draft_token_ids)
        return verifier_pb2.RoundVerified(
            round=request.round, base_len=request.base_len, target_token_ids=targets, model_us=200
        )


def _measure(verified: verifier_pb2.RoundVerified, signals: verifier_pb2.Signals, num_drafts: int) -> None:
    """Adds what was asked for: relevance falls along the draft, the target doubts every other place."""
    places = range(num_drafts + 1)
    if signals.relevance:
        verified.relevance.extend(1 - 0.05 * place for place in places)
    if signals.entropy:
        verified.entropy.extend(float(place % 2) for place in places)
    if signals.log_probabilities:
        verified.draft_log_probabilities.extend(-2.0 for _ in range(num_drafts))
        verified.target_log_probabilities.extend(-0.5 for _ in places)
    if signals.num_top_log_probabilities:
        verified.top.extend(_top(signals) for _ in places)


def _top(signals: verifier_pb2.Signals) -> verifier_pb2.TopTokens:
    ranks = range(signals.num_top_log_probabilities)
    return verifier_pb2.TopTokens(
        token_ids=[10 + rank for rank in ranks], log_probabilities=[-0.5 - rank for rank in ranks]
    )


Fault = Callable[[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse], AsyncIterator[drafter_pb2.DraftResponse]]


class FakeDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """The drafter's contract over a toy model; it agrees with the verifier with a given probability per token."""

    def __init__(self, model: ToyModel, *, agreement: float = 1.0) -> None:
        self.model = model
        self.agreement = agreement
        self.streams = Streams()
        self.opens: list[drafter_pb2.OpenDraft] = []
        self.fault: Fault | None = None
        self.fault_from_round = 1
        self.open_error: Exception | None = None
        self.hang_open = False
        self.version = foveate.__version__
        self.model_fingerprint = "f" * 32
        self.tokenizer_sha256 = hashlib.sha256(toy_tokenizer().to_str().encode()).hexdigest()
        self.layout = kv_pb2.KvLayout()
        self.modes = [answers_pb2.DRAFT_MODE_SPARSE]
        self.namespace = "here"
        self.model_us = 100

    async def GetDrafterInfo(self, request: Any, context: Any) -> drafter_pb2.GetDrafterInfoResponse:
        return drafter_pb2.GetDrafterInfoResponse(
            version=self.version,
            model="toy",
            model_fingerprint=self.model_fingerprint,
            device="cpu",
            shm_namespace_id=self.namespace,
            max_draft_tokens=16,
            kinds=[
                drafter_pb2.DrafterKind(
                    mode=mode,
                    model="toy",
                    model_fingerprint=self.model_fingerprint,
                    tokenizer_sha256=self.tokenizer_sha256,
                    layout=self.layout,
                )
                for mode in self.modes
            ],
        )

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[drafter_pb2.DraftResponse]:
        with self.streams.stream():
            rows, chance = _Rows(0), random.Random(7)
            async for request in requests:
                reply = drafter_pb2.DraftResponse(request_id=request.request_id)
                if request.WhichOneof("payload") == "open":
                    await self._open(request.open)
                    rows = _Rows(request.open.num_prompt_tokens)
                    reply.opened.num_sparse_tokens = 4
                    yield reply
                    continue
                reply.drafted.CopyFrom(self._draft(rows, request.round, chance))
                if self.fault is None or request.round.round < self.fault_from_round:
                    yield reply
                    continue
                async for faulty in self.fault(request, reply):
                    yield faulty

    async def _open(self, request: drafter_pb2.OpenDraft) -> None:
        self.opens.append(request)
        if self.open_error is not None:
            raise self.open_error
        if request.kv_handle.shm.namespace_id != self.namespace:
            raise FailedPrecondition("the pool lies in the shared memory of another host", reason="KV_NOT_SHARED")
        if self.hang_open:
            await asyncio.Event().wait()

    def _draft(self, rows: _Rows, request: drafter_pb2.DraftRound, chance: random.Random) -> drafter_pb2.RoundDrafted:
        self.streams.num_rounds += 1
        rows.advance(request.round, request.base_len, request.token_ids)
        drafted: list[int] = []
        for _ in range(request.num_draft_tokens):
            token_id = self.model.next([*rows.answer, *drafted])
            if chance.random() >= self.agreement:
                token_id = 2 + (token_id - 1) % (toy_tokenizer().get_vocab_size() - 2)
            drafted.append(token_id)
        rows.speculate(drafted)
        return drafter_pb2.RoundDrafted(
            round=request.round, base_len=request.base_len, draft_token_ids=drafted, model_us=self.model_us
        )


def _handle(pool_id: str, namespace: str) -> kv_pb2.KvHandle:
    return kv_pb2.KvHandle(
        pool_id=pool_id,
        epoch=1,
        pool_bytes=1 << 20,
        shm=kv_pb2.ShmSegment(path="/dev/shm/none", namespace_id=namespace),
    )


@dataclass
class Stack:
    """A gateway between a fake verifier and a fake drafter, and stubs of its public services."""

    verifier: FakeVerifier
    drafter: FakeDrafter
    backends: Backends
    server: Server
    answers: answers_pb2_grpc.AnswerServiceAsyncStub
    contexts: contexts_pb2_grpc.ContextServiceAsyncStub


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    deltas: tuple[answers_pb2.AnswerDelta, ...]
    started: answers_pb2.AnswerStarted
    finished: answers_pb2.AnswerFinished


async def ask(stack: Stack, question: str = PROMPT_TEXT, *, timeout_s: float | None = None, **fields: Any) -> Answer:
    """Asks and collects the whole answer."""
    request = answers_pb2.AskRequest(**{"context": CONTEXT, "question": question, **fields})
    events = [event async for event in stack.answers.Ask(request, timeout=timeout_s)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) <= {"delta"}
    deltas = tuple(event.delta for event in events[1:-1])
    return Answer(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        deltas=deltas,
        started=events[0].started,
        finished=events[-1].finished,
    )


class _Silence(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, verifier: FakeVerifier) -> None:
        self._verifier = verifier

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        while self._verifier.is_silent:  # noqa: ASYNC110 - a switch of the test's
            await asyncio.sleep(0.01)
        return await continuation(details)


@contextlib.asynccontextmanager
async def serving_verifier(verifier: FakeVerifier, address: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    """Serves a fake verifier; SERVING."""
    add = functools.partial(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, verifier)
    async with running(
        Server(
            [ServiceRegistration("foveate.v1.VerifierService", add)], address=address, interceptors=[_Silence(verifier)]
        ),
        grace_s=0,
    ) as s:
        await s.set_serving(True)
        yield s


@contextlib.asynccontextmanager
async def serving_drafter(drafter: FakeDrafter, address: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    """Serves a fake drafter; SERVING."""
    add = functools.partial(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, drafter)
    async with running(
        Server([ServiceRegistration("foveate.v1.DrafterService", add)], address=address), grace_s=0
    ) as s:
        await s.set_serving(True)
        yield s


@contextlib.asynccontextmanager
async def serving_gateway(verifier: FakeVerifier, drafter: FakeDrafter, config: GatewayConfig) -> AsyncIterator[Stack]:
    """Runs the real gateway on the addresses of `config`; does not wait for it to be SERVING."""
    async with contextlib.AsyncExitStack() as stack:
        backends = await stack.enter_async_context(connected(config))
        server = await stack.enter_async_context(running(make_server(config, backends), grace_s=0))
        following = asyncio.create_task(backends.follow(server.set_serving))
        stack.callback(following.cancel)
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{server.port}"))
        answers: Any = answers_pb2_grpc.AnswerServiceStub(channel)
        contexts: Any = contexts_pb2_grpc.ContextServiceStub(channel)
        yield Stack(verifier, drafter, backends, server, answers, contexts)


@contextlib.asynccontextmanager
async def running_stack(
    verifier: FakeVerifier, drafter: FakeDrafter, *, with_drafter: bool = True, **settings: Any
) -> AsyncIterator[Stack]:
    """Serves both fakes and a gateway on them, and waits until it is ready."""
    async with serving_verifier(verifier) as verifier_server, serving_drafter(drafter) as drafter_server:
        config = GatewayConfig(
            verifier=f"127.0.0.1:{verifier_server.port}",
            drafter=f"127.0.0.1:{drafter_server.port}" if with_drafter else None,
            health_interval_s=0.05,
            **{"adapts_draft_length": False, **settings},  # else the rounds would depend on the clock
        )
        async with serving_gateway(verifier, drafter, config) as stack:
            await until(lambda: is_ready(stack.backends) and stack.backends.drafters.is_ready == with_drafter)
            yield stack


def is_ready(backends: Backends) -> bool:
    """Returns whether the gateway has a verifier."""
    try:
        backends.served()
    except Unavailable:
        return False
    return True


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> float:
    """Waits for a condition and returns how long it took, in seconds. Raises TimeoutError."""
    start_s = time.perf_counter()
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)
    return time.perf_counter() - start_s
