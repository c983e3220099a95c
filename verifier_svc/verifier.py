"""The verifier: contexts, sequences and the device thread they share. The servicer calls it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from engine.device_thread import DeviceThread
from engine.scheduler import Scheduler
from foveate.context_source import ContextFetch, ContextSource
from foveate.rpc.errors import FoveateError
from foveate.telemetry import conventions as names
from foveate.telemetry import metrics
from foveate.telemetry.spans import write
from foveate.v1 import contexts_pb2
from verifier_svc import data_url
from verifier_svc.config import VerifierConfig
from verifier_svc.contexts import ContextStore, HeldContext, not_held
from verifier_svc.creations import Creation, Creations
from verifier_svc.directory import Elsewhere
from verifier_svc.engine_parts import EngineParts
from verifier_svc.fetching import Fetcher
from verifier_svc.flights import Flights
from verifier_svc.keeping import ContextKeeper
from verifier_svc.media import Media, check_stored_rate, open_below_root
from verifier_svc.memory import Memory
from verifier_svc.obtain import Obtainer
from verifier_svc.prefill import ContextIdentity, Prefiller
from verifier_svc.progress import Progress, ProgressBoard
from verifier_svc.receiving import PROGRESS_INTERVAL_S, Emit, Receiving, UploadChunk
from verifier_svc.redis_side import RedisSide
from verifier_svc.sessions import Session, Sessions
from verifier_svc.threads import ParkedThreads
from verifier_svc.timeline import resolve_sampling

logger = logging.getLogger(__name__)

_WORKER_NICENESS = 3


@dataclass(frozen=True)
class ContextSpec:
    """What to prefill: a path below the media root, a URL, or else an upload of `total_bytes` (0: not announced)."""

    path: str | None
    total_bytes: int
    fps: float | None
    max_frames: int | None
    tenant: str = ""
    usable_pool_ids: frozenset[str] = frozenset()
    request_id: str = ""
    sha256: str = ""
    url: str | None = None
    stored_fps: float | None = None

    @property
    def description(self) -> bytes:
        """What two requests of the same id must agree in; of one length, whatever a URL holds."""
        asked = (self.path, self.url, self.total_bytes, self.fps, self.max_frames, self.stored_fps, self.sha256)
        return hashlib.sha256(repr(asked).encode()).digest()


@dataclass(frozen=True)
class Created:
    """A context as its creator hears of it: held here, or by the pool of another verifier."""

    context: contexts_pb2.Context
    pool_id: str


class Verifier:
    """One model on one device. Made by `load`, closed by `close`."""

    def __init__(self, parts: EngineParts, config: VerifierConfig, device: DeviceThread) -> None:
        self.parts = parts
        self.config = config
        self.device = device
        self.scheduler = Scheduler(device, max_rows=config.max_step_rows)
        self.redis = None if config.cold is None else RedisSide(parts, config.cold, device)
        self.contexts = ContextStore(
            free=lambda slab: _ignore(device.submit(parts.pool.free, slab)),
            on_gone=self._context_is_gone,
        )
        self.threads = ParkedThreads(free=lambda slab: _ignore(device.submit(parts.pool.free, slab)))
        if self.redis is not None:
            self.redis.start(self.contexts)
        self._workers = _workers(config)
        self._fetcher = Fetcher(config.fetch)
        # Apart from the decode workers: a slow host must not keep them.
        self._fetchers = ThreadPoolExecutor(config.num_fetch_workers, thread_name_prefix="fetch")
        self._memory = Memory(parts.pool, device, self.contexts, self.threads)
        self._flights: Flights[HeldContext | Elsewhere] = Flights()
        self._prefiller = Prefiller(parts, config, scheduler=self.scheduler, workers=self._workers, memory=self._memory)
        self._obtainer = Obtainer(
            parts,
            device=device,
            contexts=self.contexts,
            memory=self._memory,
            prefiller=self._prefiller,
            redis=self.redis,
        )
        self._keeper = ContextKeeper(self.contexts, self.redis, ttl_s=config.context_ttl_s)
        self._keeper.start()
        self._sessions = Sessions(
            parts,
            config,
            scheduler=self.scheduler,
            obtain=self.obtain,
            give_back=self.contexts.give_back,
            memory=self._memory,
            threads=self.threads,
            on_idle=self._start_audit,
        )
        self._creations = Creations()
        self._audits: set[asyncio.Task[None]] = set()
        self._resolved = metrics.counter(names.METRIC_CONTEXTS_RESOLVED, "Contexts asked for, by what gave them")

    @classmethod
    async def load(cls, config: VerifierConfig, device: DeviceThread) -> Verifier:
        """Loads the model on the device thread; raises what EngineParts.load raises."""
        await device.run(torch.set_num_threads, config.num_threads)
        return cls(await device.run(EngineParts.load, config), config, device)

    async def close(self) -> None:
        """Ends what is running, waits for the device's last step and removes the pool."""
        await self._flights.drain()
        self._creations.close()
        await self._keeper.close()
        if self.redis is not None:
            await self.redis.close()
        for audit in self._audits:
            audit.cancel()
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=True)
        self._prefiller.close()
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

    async def create_context(self, spec: ContextSpec, chunks: AsyncIterator[UploadChunk], emit: Emit) -> Created:
        """Returns the context of a video; `emit` hears of progress.

        Two callers with the same video and sampling share one prefill, which ends when the last of them is cancelled.
        A request that was sent before goes on where it broke off, or gets what was made then.
        """
        if not spec.request_id:
            return await self._create(spec, chunks, emit, None)
        creation = self._creations.begin(spec.tenant, spec.request_id, spec.description)
        board = creation.board
        assert board is not None, "it runs now"

        async def emit_to_all(progress: Progress) -> None:
            board.report(progress.stage, progress.done, progress.total)
            await emit(progress)

        created: Created | None = None
        try:
            if creation.context_id is not None:
                created = await self._made_before(creation.context_id, spec.tenant)
            if created is None:
                created = await self._create(spec, chunks, emit_to_all, creation)
            return created
        finally:
            context_id = None if created is None else created.context.name.removeprefix("contexts/")
            self._creations.ended(creation, context_id=context_id, spool=creation.spool)

    async def watch(self, tenant: str, *, request_id: str, context_id: str, emit: Emit) -> contexts_pb2.Context:
        """Tells `emit` of the progress of a creation or of a context, and returns the context. Raises NotFound."""
        if request_id:
            progress = self._creations.watch(tenant, request_id, min_interval_s=PROGRESS_INTERVAL_S)
        else:
            progress = self._flights.watch(context_id, min_interval_s=PROGRESS_INTERVAL_S)
        if progress is not None:
            async for one in progress:
                await emit(one)
        context_id = context_id or self._creations.result(tenant, request_id)
        for context in await self._keeper.listed(tenant, include_cold=True, context_id=context_id):
            return context
        raise not_held(context_id)

    async def _create(
        self, spec: ContextSpec, chunks: AsyncIterator[UploadChunk], emit: Emit, creation: Creation | None
    ) -> Created:
        limits = self.config.media
        sampling = resolve_sampling(
            spec.fps, spec.max_frames, spec.stored_fps, default_fps=limits.default_fps, frames_ceiling=limits.max_frames
        )
        media = await self._receive(spec, chunks, emit, creation)
        with contextlib.ExitStack() as owned:
            owned.callback(media.close)
            media.stored_fps = sampling.stored_fps
            video = self._prefiller.open_video(media)
            check_stored_rate(media, video.format_name)
            await self._in_worker(self._prefiller.refuse_by_claims, video, sampling)
            context_id = self.parts.identity.context_id(
                media_sha256=media.sha256, sampling=sampling, tenant=spec.tenant
            )
            start_ns = time.time_ns()
            if (held := self.contexts.hit_exact(context_id)) is not None:
                self._resolved_by(ContextSource.POOL, start_ns, context_id)
                return self._created(held, reused=True)
            identity = ContextIdentity(context_id, spec.tenant, media.sha256, media.num_bytes, sampling)

            async def make(board: ProgressBoard) -> HeldContext | Elsewhere:
                await self._flights.ended(_cold_key(context_id))
                if (held := self.contexts.hit_exact(context_id)) is not None:
                    return held
                return await self._obtainer.make(media, identity, spec.usable_pool_ids, board)

            async with self._flights.join(context_id, make, on_done=media.close) as flight:
                owned.pop_all()  # the flight closes the file
                async for progress in flight.progress(min_interval_s=PROGRESS_INTERVAL_S):
                    await emit(progress)
                made = await flight.result()
        if isinstance(made, Elsewhere):
            context = contexts_pb2.Context()
            context.CopyFrom(made.context)
            context.reused = True
            return Created(context, made.pool_id)
        self._resolved_by(made.fetch.source, start_ns, context_id)
        return self._created(made, reused=made.fetch.source is not ContextSource.MEDIA)

    async def _made_before(self, context_id: str, tenant: str) -> Created | None:
        try:
            held, _ = await self.obtain(context_id, tenant)
        except FoveateError:  # gone meanwhile: it has to be made again
            return None
        self.contexts.give_back(held)
        return self._created(held, reused=True)

    async def obtain(self, context_id: str, tenant: str) -> tuple[HeldContext, ContextFetch]:
        """Returns a context for one answer, which gives it back, and how it was come by.

        Raises NotFound when it is neither in the pool nor in the cold tier, or another tenant's.
        """
        if (held := self.contexts.hit(context_id)) is not None:
            if held.facts.tenant != tenant:
                raise not_held(context_id)
            self._count_resolved(ContextSource.POOL)
            return self.contexts.acquire(context_id), self._keeper.fetch_of_hit(held)

        async def bring_back(board: ProgressBoard) -> HeldContext | Elsewhere:
            return await self._obtainer.bring_back(context_id, tenant, board)

        # A context that is being made is waited for; a creation in turn waits for what is being brought back.
        is_made = self._flights.is_running(context_id)
        key = context_id if is_made else _cold_key(context_id)
        async with self._flights.join(key, bring_back, on_done=lambda: None) as flight:
            try:
                made = await flight.result()
            except FoveateError as error:
                raise (not_held(context_id) if is_made else error) from error
        if isinstance(made, Elsewhere) or made.facts.tenant != tenant:
            raise not_held(context_id)
        self._count_resolved(made.fetch.source)
        return self.contexts.acquire(context_id), made.fetch

    async def release_context(self, context_id: str, tenant: str) -> None:
        """Frees a context and deletes its cold copies. Raises NotFound when there was neither."""
        await self._keeper.release(context_id, tenant)

    async def touch_context(self, context_id: str, tenant: str, *, pinned: bool | None) -> contexts_pb2.Context:
        """Puts a context's expiry off, and pins or unpins it. Raises NotFound when it is in neither tier."""
        return await self._keeper.touch(context_id, tenant, pinned=pinned)

    async def listed_contexts(
        self, tenant: str, *, include_cold: bool, context_id: str | None
    ) -> list[contexts_pb2.Context]:
        """Returns a tenant's contexts, or the one that is named, newest first."""
        return await self._keeper.listed(tenant, include_cold=include_cold, context_id=context_id)

    def context_counters(self) -> dict[str, int]:
        """Returns what happened to contexts since the start, by name (docs/contexts.md)."""
        counters = Counter(self._obtainer.counters)
        counters["pool_hits"] = self.contexts.num_hits
        if self.redis is not None:
            counters += self.redis.counters()
        return dict(counters)

    def _resolved_by(self, source: ContextSource, start_ns: int, context_id: str) -> None:
        self._count_resolved(source)
        write(names.SPAN_CONTEXT_RESOLVE, start_ns, {names.TIER: _tier(source), names.CONTEXT: context_id})

    def _count_resolved(self, source: ContextSource) -> None:
        self._resolved.add(1, {names.TIER: _tier(source)})

    def _created(self, held: HeldContext, *, reused: bool) -> Created:
        context = self._keeper.message(held)
        context.reused = reused
        return Created(context, self.parts.pool.handle.pool_id)

    async def _receive(
        self, spec: ContextSpec, chunks: AsyncIterator[UploadChunk], emit: Emit, creation: Creation | None
    ) -> Media:
        if spec.path is not None:
            media: Media = await self._in_worker(open_below_root, spec.path, self.config.media_root)
            return media
        if spec.url is not None and spec.url.startswith(data_url.PREFIX):
            read = functools.partial(data_url.media_of_data_url, max_bytes=self.config.media.max_upload_bytes)
            media = await self._in_worker(read, spec.url)
            return media
        if spec.url is not None:
            return await asyncio.get_running_loop().run_in_executor(self._fetchers, self._fetcher.fetch, spec.url)
        receiving = Receiving(spec.total_bytes, self.config.media.max_upload_bytes, creation)
        return await receiving.receive(chunks, emit, expected_sha256=spec.sha256)

    async def _in_worker(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, fn, *args)

    def _context_is_gone(self, context_id: str) -> None:
        self.threads.forget(context_id)
        if self.redis is not None:
            self.redis.directory.withdraw_soon(context_id)

    def _start_audit(self) -> None:
        audit = asyncio.create_task(self._audit())
        self._audits.add(audit)
        audit.add_done_callback(self._audits.discard)

    async def _audit(self) -> None:
        """Checks, when nothing runs, that the pool holds the contexts' slabs and nothing else, and nobody uses them."""
        try:
            num_slabs = await self.device.run(self._count_slabs)
        except Exception:
            logger.exception("the idle KV pool failed its integrity check")
            return
        if self.num_sequences or self._flights.num_running:
            return
        num_known = self.contexts.num_slabs + self.threads.num_slabs
        if num_slabs != num_known:
            logger.error("idle KV pool: %d slabs taken, contexts and threads hold %d", num_slabs, num_known)
        num_users = sum(held.num_users for held in self.contexts.newest_first())
        if num_users or self.scheduler.num_live:
            logger.error("idle verifier: %d uses of contexts, %d works live", num_users, self.scheduler.num_live)

    def _count_slabs(self) -> int:
        self.parts.pool.check_integrity()
        return self.parts.pool.num_slabs


def _tier(source: ContextSource) -> str:
    """The word for where a context came from, in spans and metrics."""
    return "computed" if source is ContextSource.MEDIA else source.name.lower()


def _cold_key(context_id: str) -> str:
    """The flight that brings a context back, beside the one that makes it from a video."""
    return f"{context_id}/cold"


def _workers(config: VerifierConfig) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        config.num_decode_workers,
        thread_name_prefix="decode",
        initializer=_begin_worker,
        initargs=(config.num_threads,),
    )


def _begin_worker(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    if sys.platform == "linux":  # there, priority is a thread's own: frames of a new video must not slow answers down
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WORKER_NICENESS)


def _ignore(_: object) -> None:
    """Drops a result nobody waits for."""
