"""The verifier: contexts, sequences and the device thread they share. The servicer calls it; it knows no protobuf."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from engine.device_thread import DeviceThread
from foveate.rpc.channel import CHUNK_BYTES
from foveate.rpc.errors import invalid
from verifier_svc.config import VerifierConfig
from verifier_svc.contexts import ContextFacts, ContextStore, HeldContext
from verifier_svc.engine_parts import EngineParts
from verifier_svc.flights import Flights
from verifier_svc.media import Media, UploadSpool, open_below_root
from verifier_svc.memory import Memory
from verifier_svc.prefill import Prefiller
from verifier_svc.progress import Progress, ProgressBoard, Stage
from verifier_svc.sessions import Session, Sessions
from verifier_svc.timeline import FrameSampling, resolve_sampling

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.1
Emit = Callable[[Progress], Awaitable[None]]


@dataclass(frozen=True)
class ContextSpec:
    """What to prefill: a path below the media root, or an upload (`path` None) of `total_bytes` (0: not announced)."""

    path: str | None
    total_bytes: int
    fps: float | None
    max_frames: int | None


@dataclass(frozen=True)
class UploadChunk:
    """A piece of an upload."""

    write_offset: int
    data: bytes


class Verifier:
    """One model on one device. Made by `load`, closed by `close`."""

    def __init__(self, parts: EngineParts, config: VerifierConfig, device: DeviceThread) -> None:
        self.parts = parts
        self.config = config
        self.device = device
        self.contexts = ContextStore(free=lambda slab: _ignore(device.submit(parts.pool.free, slab)))
        self._workers = _workers(config)
        self._memory = Memory(parts.pool, device, self.contexts)
        self._flights: Flights[HeldContext] = Flights()
        self._prefiller = Prefiller(
            parts, config, device=device, workers=self._workers, contexts=self.contexts, memory=self._memory
        )
        self._sessions = Sessions(
            parts, config, device=device, contexts=self.contexts, memory=self._memory, on_idle=self._start_audit
        )
        self._audits: set[asyncio.Task[None]] = set()

    @classmethod
    async def load(cls, config: VerifierConfig, device: DeviceThread) -> Verifier:
        """Loads the model on the device thread; raises what EngineParts.load raises."""
        await device.run(torch.set_num_threads, config.num_threads)
        return cls(await device.run(EngineParts.load, config), config, device)

    async def close(self) -> None:
        """Ends what is running, waits for the device's last step and removes the pool."""
        await self._flights.drain()
        for audit in self._audits:
            audit.cancel()
        self._workers.shutdown(wait=True)
        await self.device.run(self.parts.pool.close)

    @property
    def num_sequences(self) -> int:
        """Number of open sequences."""
        return self._sessions.num_open

    @property
    def num_prefills(self) -> int:
        """Number of contexts that are being made, cancelled ones that still clean up included."""
        return self._flights.num_running

    def session(self) -> Session:
        """Returns a session for one Verify stream."""
        return Session(self._sessions)

    async def create_context(
        self, spec: ContextSpec, chunks: AsyncIterator[UploadChunk], emit: Emit
    ) -> tuple[ContextFacts, bool]:
        """Returns the context of a video and whether it was held already; `emit` hears of progress.

        Two callers with the same video and sampling share one prefill, which ends when the last of them is cancelled.
        """
        limits = self.config.media
        sampling = resolve_sampling(
            spec.fps, spec.max_frames, default_fps=limits.default_fps, frames_ceiling=limits.max_frames
        )
        media = await self._receive(spec, chunks, emit)
        with contextlib.ExitStack() as owned:
            owned.callback(media.close)
            video = self._prefiller.open_video(media)
            await self._in_worker(self._prefiller.refuse_by_claims, video, sampling)
            context_id = self.parts.identity.context_id(media_sha256=media.sha256, sampling=sampling)
            held = self.contexts.get(context_id)
            if held is not None:
                return held.facts, True
            job = self._prefill_job(media, sampling, context_id)
            async with self._flights.join(context_id, job, on_done=media.close) as flight:
                owned.pop_all()  # the flight closes the file
                async for progress in flight.progress(min_interval_s=PROGRESS_INTERVAL_S):
                    await emit(progress)
                return (await flight.result()).facts, False

    def _prefill_job(
        self, media: Media, sampling: FrameSampling, context_id: str
    ) -> Callable[[ProgressBoard], Coroutine[Any, Any, HeldContext]]:
        async def job(board: ProgressBoard) -> HeldContext:
            return await self._prefiller.prefill(media, sampling, context_id, board)

        return job

    async def _receive(self, spec: ContextSpec, chunks: AsyncIterator[UploadChunk], emit: Emit) -> Media:
        if spec.path is not None:
            media: Media = await self._in_worker(open_below_root, spec.path, self.config.media_root)
            return media
        spool = UploadSpool(max_bytes=self.config.media.max_upload_bytes, announced_bytes=spec.total_bytes)
        last_emit_s = 0.0
        try:
            async for chunk in chunks:
                if len(chunk.data) > CHUNK_BYTES:
                    raise invalid("chunk.data", f"must be at most {CHUNK_BYTES} bytes, is {len(chunk.data)}")
                await asyncio.to_thread(spool.append, chunk.data, chunk.write_offset)
                if time.monotonic() - last_emit_s >= PROGRESS_INTERVAL_S:
                    last_emit_s = time.monotonic()
                    await emit(Progress(Stage.UPLOAD, spool.num_bytes, spec.total_bytes))
            media = spool.finish()
            await emit(Progress(Stage.UPLOAD, media.num_bytes, media.num_bytes))
        except BaseException:
            spool.discard()
            raise
        return media

    async def _in_worker(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, fn, *args)

    def _start_audit(self) -> None:
        audit = asyncio.create_task(self._audit())
        self._audits.add(audit)
        audit.add_done_callback(self._audits.discard)

    async def _audit(self) -> None:
        """Checks, when nothing runs, that the pool holds the contexts' slabs and nothing else."""
        try:
            num_slabs = await self.device.run(self._count_slabs)
        except Exception:
            logger.exception("the idle KV pool failed its integrity check")
            return
        is_idle = self.num_sequences == 0 and self._flights.num_running == 0
        if is_idle and num_slabs != self.contexts.num_slabs:
            logger.error("idle KV pool: %d slabs taken, %d contexts held", num_slabs, self.contexts.num_slabs)

    def _count_slabs(self) -> int:
        self.parts.pool.check_integrity()
        return self.parts.pool.num_slabs


def _workers(config: VerifierConfig) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        config.num_decode_workers,
        thread_name_prefix="decode",
        initializer=torch.set_num_threads,
        initargs=(config.num_threads,),
    )


def _ignore(_: object) -> None:
    """Drops a result nobody waits for."""
