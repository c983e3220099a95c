"""Making a context: decode -> processor -> vision tower -> text model, in chunks, into one slab.

worker thread   decode and process chunk i+1
device thread                                 encode chunk i | ... other answers' rounds ... | prefill chunk j
event loop      asks for the next chunk, reports progress; a cancel between two steps frees everything
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import KvView
from engine.device_thread import DeviceThread
from engine.kv_memory import PAGE_BYTES
from engine.kv_pool import Slab
from foveate.rpc.errors import ResourceExhausted
from foveate.video import ContextTimings, VideoFacts
from verifier_svc.config import VerifierConfig
from verifier_svc.contexts import ContextFacts, ContextStore, HeldContext
from verifier_svc.engine_parts import EngineParts
from verifier_svc.frames import Grid
from verifier_svc.media import Media
from verifier_svc.memory import Memory, SlabLease
from verifier_svc.progress import ProgressBoard, Stage
from verifier_svc.timeline import FramePlan, FrameSampling
from verifier_svc.video import VideoFile
from verifier_svc.workers import iterate_in_worker


@dataclass(frozen=True)
class _PatchChunk:
    """Patches of consecutive frames, with their times; decode and processing time in milliseconds."""

    patches: Tensor  # [num_patches, patch_width]
    grid: Grid
    timestamps_s: tuple[float, ...]
    decode_ms: float
    process_ms: float


@dataclass(frozen=True)
class _Encoded:
    """A whole video in the model's embedding space."""

    features: Tensor  # [num_visual_tokens, hidden]
    grid: Grid
    timestamps_s: tuple[float, ...]
    decode_ms: float
    encode_ms: float


class Prefiller:
    """Makes contexts. Work of one video is split into device steps short enough to let rounds through."""

    def __init__(
        self,
        parts: EngineParts,
        config: VerifierConfig,
        *,
        device: DeviceThread,
        workers: Executor,
        contexts: ContextStore,
        memory: Memory,
    ) -> None:
        self._parts = parts
        self._config = config
        self._device = device
        self._workers = workers
        self._contexts = contexts
        self._memory = memory

    def open_video(self, media: Media) -> VideoFile:
        """Tells the container format; INVALID_ARGUMENT when it is none of ours."""
        return VideoFile.of(media, self._config.media, num_threads=self._config.num_threads)

    def refuse_by_claims(self, video: VideoFile, sampling: FrameSampling) -> None:
        """Reads the headers and refuses what is too large by them, before anything is hashed, decoded or computed."""
        facts = video.facts()
        by_time = int(facts.claimed_duration_s * sampling.fps)
        num_frames = min(sampling.max_frames, by_time, facts.claimed_num_frames or by_time)
        if num_frames:
            self._check_tokens(self._plan_grid(num_frames, facts.width, facts.height))

    async def prefill(
        self, media: Media, sampling: FrameSampling, context_id: str, board: ProgressBoard
    ) -> HeldContext:
        """Makes the context and hands it to the store. Everything taken is freed when it fails or is cancelled."""
        loop = asyncio.get_running_loop()
        video = self.open_video(media)
        facts = await loop.run_in_executor(self._workers, video.facts)
        timeline = await loop.run_in_executor(self._workers, video.timeline)
        plan = timeline.plan(sampling)
        self._check_tokens(self._plan_grid(plan.num_frames, facts.width, facts.height))
        encoded = await self._encode(video, plan, board)
        video_facts = VideoFacts(
            duration_s=plan.duration_s,
            num_frames=len(encoded.timestamps_s),
            sampled_fps=plan.sampled_fps,
            frame_timestamps_s=encoded.timestamps_s,
            width=facts.width,
            height=facts.height,
        )
        lease = SlabLease(self._parts.pool)
        try:
            return await self._prefill_text(encoded, video_facts, context_id, lease, board)
        finally:
            self._device.submit(lease.free_all)

    async def _encode(self, video: VideoFile, plan: FramePlan, board: ProgressBoard) -> _Encoded:
        board.report(Stage.DECODE, 0, plan.num_frames)
        features: list[Tensor] = []
        grids: list[Grid] = []
        times: list[float] = []
        decode_ms = encode_ms = 0.0
        async with contextlib.aclosing(iterate_in_worker(self._workers, self._patches(video, plan))) as chunks:
            async for chunk in chunks:
                times.extend(chunk.timestamps_s)
                board.report(Stage.DECODE, len(times), plan.num_frames)
                encoded, took_ms = await self._device.run(self._encode_chunk, chunk)
                features.append(encoded)
                grids.append(chunk.grid)
                decode_ms += chunk.decode_ms
                encode_ms += chunk.process_ms + took_ms
                board.report(Stage.ENCODE, len(times), plan.num_frames)
        grid = Grid(sum(one.num_temporal for one in grids), grids[0].num_rows, grids[0].num_columns)
        return _Encoded(await self._device.run(torch.cat, features), grid, tuple(times), decode_ms, encode_ms)

    def _patches(self, video: VideoFile, plan: FramePlan) -> Generator[_PatchChunk, None, None]:
        """Decodes and processes in the worker; a chunk is a multiple of the temporal patch."""
        frames = self._parts.frames
        facts = video.facts()
        patches_per_step = self._plan_grid(1, facts.width, facts.height).num_patches
        bytes_per_step = 3 * facts.width * facts.height * frames.temporal_patch
        steps = self._config.encode_chunk_patches // patches_per_step
        steps = max(1, min(steps, self._config.decode_chunk_bytes // bytes_per_step))
        before = time.perf_counter()
        for chunk in video.read(plan, frames_per_chunk=steps * frames.temporal_patch):
            decoded = time.perf_counter()
            patches, grid = frames.process(chunk.frames, num_frames_of_video=plan.num_frames)
            processed = time.perf_counter()
            yield _PatchChunk(patches, grid, chunk.timestamps_s, (decoded - before) * 1e3, (processed - decoded) * 1e3)
            before = time.perf_counter()

    def _encode_chunk(self, chunk: _PatchChunk) -> tuple[Tensor, float]:
        loaded = self._parts.loaded
        before = time.perf_counter()
        patches = chunk.patches.to(device=loaded.device, dtype=loaded.dtype)
        features = loaded.family.encode_video(loaded.model, patches, chunk.grid.as_tensor().to(loaded.device))
        return features, (time.perf_counter() - before) * 1e3

    async def _prefill_text(
        self, encoded: _Encoded, video: VideoFacts, context_id: str, lease: SlabLease, board: ProgressBoard
    ) -> HeldContext:
        parts, num_visual = self._parts, encoded.features.shape[0]
        token_ids = parts.prompts.context_token_ids(num_visual)
        visual_start = token_ids.index(parts.loaded.family.video_token_id)
        grid = (encoded.grid.num_temporal, encoded.grid.num_rows, encoded.grid.num_columns)
        second_per_grid = parts.frames.temporal_patch / video.sampled_fps
        positions = parts.loaded.family.positions(token_ids, [grid], [second_per_grid])
        slab = await self._memory.take(lease, len(token_ids))
        prefill_ms = 0.0
        step_tokens = self._config.prefill_chunk_tokens
        board.report(Stage.PREFILL, 0, len(token_ids))
        for start in range(0, len(token_ids), step_tokens):
            rows = range(start, min(start + step_tokens, len(token_ids)))
            prefill_ms += await self._device.run(
                self._prefill_chunk, slab, token_ids, encoded.features, visual_start, positions.ids, rows
            )
            board.report(Stage.PREFILL, rows.stop, len(token_ids))
        facts = ContextFacts(
            context_id=context_id,
            num_tokens=len(token_ids),
            visual_start=visual_start,
            num_visual_tokens=num_visual,
            position_delta=positions.next_position - len(token_ids),
            video=video,
            timings=ContextTimings(encoded.decode_ms, encoded.encode_ms, prefill_ms),
            kv_bytes=_whole_pages(parts.pool.layout.slab_bytes(slab.capacity)),
            create_time_ns=time.time_ns(),
        )
        # No step of ours is queued any more, and no await lies between these lines: the slab always has one owner.
        lease.hand_over(slab)
        return self._contexts.add(facts, slab)

    @torch.inference_mode()
    def _prefill_chunk(
        self,
        slab: Slab,
        token_ids: Sequence[int],
        features: Tensor,
        visual_start: int,
        positions: Tensor,
        rows: range,
    ) -> float:
        """Runs rows of the context through the text model into its slab; returns milliseconds."""
        before = time.perf_counter()
        runner = self._parts.runner
        embeds = runner.embed(token_ids[rows.start : rows.stop]).clone()
        first = max(rows.start, visual_start)
        last = min(rows.stop, visual_start + features.shape[0])
        if first < last:
            embeds[first - rows.start : last - rows.start] = features[first - visual_start : last - visual_start]
        kv = KvView(context=None, thread=self._parts.pool.views(slab), thread_len=rows.start)
        runner.forward(embeds=embeds, positions=positions[:, rows.start : rows.stop], kv=kv)
        if self._parts.loaded.device.type == "cuda":
            torch.cuda.synchronize(self._parts.loaded.device)
        return (time.perf_counter() - before) * 1e3

    def _plan_grid(self, num_frames: int, width: int, height: int) -> Grid:
        return self._parts.frames.plan(num_frames=num_frames, height=height, width=width)

    def _check_tokens(self, grid: Grid) -> None:
        needed, limit = self._parts.frames.num_tokens(grid), self._config.media.max_visual_tokens
        if needed > limit:
            raise ResourceExhausted(
                f"the video needs {needed} visual tokens; the limit is {limit}: ask for a lower fps or fewer frames",
                reason="TOO_MANY_VISUAL_TOKENS",
                metadata={"needed_tokens": str(needed), "limit_tokens": str(limit)},
            )
        self._memory.refuse_if_too_large(needed)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
