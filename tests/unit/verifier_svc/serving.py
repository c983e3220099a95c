"""A real verifier in this process, behind real gRPC, and a client that speaks the round protocol."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from engine.device_thread import DeviceThread
from foveate.rpc.channel import CHUNK_BYTES, open_channel
from foveate.rpc.errors import STATUS_LOST, FoveateError, from_rpc_error
from foveate.rpc.server import Server, ServiceRegistration, running
from foveate.v1 import contexts_pb2, verifier_pb2, verifier_pb2_grpc
from tests.kernels import KERNEL_CACHE
from verifier_svc.config import MIB, MediaLimits, VerifierConfig
from verifier_svc.main import SERVICE_NAME
from verifier_svc.servicer import VerifierServicer
from verifier_svc.verifier import Verifier


def config_for(checkpoint: Path, **changes: Any) -> VerifierConfig:
    """A small verifier; `media` is a dict of changed media limits."""
    media = replace(MediaLimits(max_upload_bytes=8 * MIB), **changes.pop("media", {}))
    # No spare decoders: a process that most tests would start for nothing.
    small = VerifierConfig(checkpoint, pool_bytes=8 * MIB, media=media, kernel_cache=KERNEL_CACHE, num_spare_decoders=0)
    return replace(small, **changes)


@dataclass(frozen=True)
class Served:
    """A verifier that serves, and stubs that reach it."""

    verifier: Verifier
    stub: verifier_pb2_grpc.VerifierServiceAsyncStub
    health: health_pb2_grpc.HealthAsyncStub
    server: Server

    async def prefill(self, data: bytes, **sampling: Any) -> contexts_pb2.Context:
        """Uploads a video and returns its context."""
        return (await self.prefill_events(upload(data, **sampling)))[-1].context

    async def prefill_events(self, requests: Iterable[Any]) -> list[verifier_pb2.PrefillResponse]:
        """Sends `requests` and returns every response; raises FoveateError.

        Asks again when grpc.aio lost the status.
        """
        sent = list(requests)
        while True:
            try:
                return [response async for response in self.stub.Prefill(iter(sent))]
            except grpc.aio.AioRpcError as error:
                found = from_rpc_error(error)
                if found.reason != STATUS_LOST:
                    raise found from None

    @contextlib.asynccontextmanager
    async def answering(self, context: str, question: str = "What?", **fields: Any) -> AsyncIterator[Stream]:
        """Opens a sequence; leaving cancels its stream."""
        stream = Stream(self.stub.Verify())
        try:
            await stream.open(context=context, question=question, **{"max_tokens": 40, **fields})
            yield stream
        finally:
            stream.call.cancel()

    async def used_bytes(self) -> int:
        """Bytes taken in the pool once the device thread has done what was queued."""
        return await self.verifier.device.run(lambda: self.verifier.parts.pool.used_bytes)


class Stream:
    """One Verify stream, by the rules of the contract."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.opened = verifier_pb2.SequenceOpened()
        self._request_id = 100
        self._round = 0

    async def open(self, **fields: Any) -> verifier_pb2.SequenceOpened:
        """Opens the sequence."""
        reply = await self.send(open=verifier_pb2.OpenSequence(**fields))
        self.opened = reply.opened
        return self.opened

    async def round(self, base_len: int, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> list[int]:
        """Runs the next round; returns the target's tokens."""
        self._round += 1
        verified = await self.repeat(self._round, base_len, token_ids, drafts)
        assert (verified.round, verified.base_len) == (self._round, base_len)
        assert len(verified.target_token_ids) == len(drafts) + 1
        return list(verified.target_token_ids)

    async def repeat(
        self, number: int, base_len: int, token_ids: Sequence[int], drafts: Sequence[int] = ()
    ) -> verifier_pb2.RoundVerified:
        """Sends a round of any number."""
        asked = verifier_pb2.VerifyRound(
            sequence_id=self.opened.sequence_id,
            round=number,
            base_len=base_len,
            token_ids=token_ids,
            draft_token_ids=drafts,
        )
        return (await self.send(round=asked)).verified

    async def send(self, **payload: Any) -> verifier_pb2.VerifyResponse:
        """Sends one request and returns its reply; raises FoveateError when the stream is aborted."""
        self._request_id += 1
        try:
            await self.call.write(verifier_pb2.VerifyRequest(request_id=self._request_id, **payload))
            reply = await self.call.read()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            reply = grpc.aio.EOF
        if reply is grpc.aio.EOF:
            raise await self.error()
        assert reply.request_id == self._request_id
        return reply

    async def error(self) -> FoveateError:
        """Returns how the stream ended."""
        failed = grpc.aio.AioRpcError(
            await self.call.code(),
            await self.call.initial_metadata(),
            await self.call.trailing_metadata(),
            details=await self.call.details(),
        )
        return from_rpc_error(failed)

    async def plain(self, num_tokens: int) -> list[int]:
        """Decodes without drafts: the first token and those after it."""
        token_ids = [self.opened.first_token_id]
        while len(token_ids) < num_tokens:
            base_len = self.opened.num_prompt_tokens + len(token_ids) - 1
            token_ids += await self.round(base_len, token_ids[-1:])
        return token_ids

    async def drafted(self, num_tokens: int, drafter: Any) -> list[int]:
        """Decodes with the drafts of `drafter(token_ids so far)`, by exact acceptance."""
        token_ids, base_len, pending = [self.opened.first_token_id], self.opened.num_prompt_tokens, 1
        while len(token_ids) < num_tokens:
            drafts = drafter(token_ids)
            targets = await self.round(base_len, token_ids[-pending:], drafts)
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == targets[accepted]:
                accepted += 1
            base_len += pending + accepted
            token_ids += [*drafts[:accepted], targets[accepted]]
            pending = 1
        return token_ids[:num_tokens]


def upload(data: bytes, *, total_bytes: int | None = None, **sampling: Any) -> Iterator[verifier_pb2.PrefillRequest]:
    """The messages of an upload."""
    announced = len(data) if total_bytes is None else total_bytes
    spec = contexts_pb2.ContextSpec(
        upload=contexts_pb2.Upload(filename="clip.mp4", total_bytes=announced),
        sampling=contexts_pb2.FrameSampling(**sampling),
    )
    yield verifier_pb2.PrefillRequest(spec=spec)
    for start in range(0, len(data), CHUNK_BYTES):
        yield verifier_pb2.PrefillRequest(
            chunk=contexts_pb2.MediaChunk(write_offset=start, data=data[start : start + CHUNK_BYTES])
        )


def named(path: str, **sampling: Any) -> list[verifier_pb2.PrefillRequest]:
    """The message that names a file below the media root."""
    spec = contexts_pb2.ContextSpec(path=path, sampling=contexts_pb2.FrameSampling(**sampling))
    return [verifier_pb2.PrefillRequest(spec=spec)]


@contextlib.asynccontextmanager
async def serving(config: VerifierConfig) -> AsyncIterator[Served]:
    """Serves a verifier for the length of the block and checks that it leaves nothing behind."""
    servicer = VerifierServicer()
    registration = ServiceRegistration(
        SERVICE_NAME, lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)
    )
    device = DeviceThread()
    try:
        async with running(Server([registration], address=config.address), grace_s=0.1) as server:
            verifier = await Verifier.load(config, device)
            servicer.serve(verifier)
            await server.set_serving(True)
            async with open_channel(f"127.0.0.1:{server.port}") as channel:
                stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
                health: Any = health_pb2_grpc.HealthStub(channel)
                try:
                    yield Served(verifier, stub, health, server)
                finally:
                    await server.stop(0.1)
                    await verifier.close()
    finally:
        device.close()
