"""Receiving an upload: chunk by chunk into a nameless file, from the start or from where it broke off before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from foveate.rpc.channel import CHUNK_BYTES
from foveate.rpc.errors import ResourceExhausted, invalid
from verifier_svc.creations import Creation
from verifier_svc.media import DIGEST_MISMATCH, Media, UploadSpool
from verifier_svc.progress import Progress, Stage

PROGRESS_INTERVAL_S = 0.1
Emit = Callable[[Progress], Awaitable[None]]


def _is_spoilt(error: BaseException) -> bool:
    """Whether what has arrived can never become the file that was announced; otherwise it is the file's beginning."""
    return isinstance(error, ResourceExhausted) or getattr(error, "reason", "") == DIGEST_MISMATCH


@dataclass(frozen=True)
class UploadChunk:
    """A piece of an upload."""

    write_offset: int
    data: bytes


class Receiving:
    """One upload on its way in. With a `creation`, what has arrived stays there when the caller goes away."""

    def __init__(self, total_bytes: int, max_bytes: int, creation: Creation | None) -> None:
        """Raises ResourceExhausted for an announced size over the limit."""
        self._total_bytes = total_bytes
        self._max_bytes = max_bytes
        self._creation = creation
        kept = None if creation is None else creation.spool
        self._spool = kept or self._new_spool()
        if creation is not None:
            creation.spool = None

    async def receive(self, chunks: AsyncIterator[UploadChunk], emit: Emit, *, expected_sha256: str) -> Media:
        """Returns the complete file, which the caller closes. Raises InvalidArgument for wrong chunks or digests."""
        try:
            if self._creation is not None:
                await emit(self._progress())
            await self._take_all(chunks, emit)
            media = self._spool.finish(expected_sha256=expected_sha256)
            await emit(Progress(Stage.UPLOAD, media.num_bytes, media.num_bytes))
        except BaseException as error:
            if self._creation is None or _is_spoilt(error):
                self._spool.discard()
            else:
                self._creation.spool = self._spool
            raise
        return media

    async def _take_all(self, chunks: AsyncIterator[UploadChunk], emit: Emit) -> None:
        last_emit_s = 0.0
        is_first = True
        async for chunk in chunks:
            if len(chunk.data) > CHUNK_BYTES:
                raise invalid("chunk.data", f"must be at most {CHUNK_BYTES} bytes, is {len(chunk.data)}")
            if is_first and chunk.write_offset == 0 and self._spool.num_bytes:
                self._spool.discard()  # the caller starts over
                self._spool = self._new_spool()
            is_first = False
            await self._append(chunk)
            if time.monotonic() - last_emit_s >= PROGRESS_INTERVAL_S:
                last_emit_s = time.monotonic()
                await emit(self._progress())

    async def _append(self, chunk: UploadChunk) -> None:
        """Appends in a thread, to its end also when the caller goes away: what is kept is always whole chunks."""
        appending = asyncio.ensure_future(asyncio.to_thread(self._spool.append, chunk.data, chunk.write_offset))
        try:
            await asyncio.shield(appending)
        except asyncio.CancelledError:
            await asyncio.wait({appending})
            raise

    def _progress(self) -> Progress:
        return Progress(Stage.UPLOAD, self._spool.num_bytes, self._total_bytes)

    def _new_spool(self) -> UploadSpool:
        return UploadSpool(max_bytes=self._max_bytes, announced_bytes=self._total_bytes)
