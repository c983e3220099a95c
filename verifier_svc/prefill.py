"""Making a context: decode -> processor -> vision tower -> text model, in chunks, into one slab.

worker thread   decode and process chunk i+1
device thread                                 encode chunk i | ... other answers' rounds ... | prefill chunk j
event loop      asks for the next chunk, reports progress; a cancel between two steps frees everything
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import KvView
from engine.batch import Block
from engine.frames import Grid
from engine.kv_memory import PAGE_BYTES
from engine.kv_pool import Slab, TensorSlab
from engine.pace import Pace, first_rows
from engine.scheduler import Scheduler, Turns
from engine.visual_rows import place_features, visual_index, visual_spans
from foveate.rpc.errors import ResourceExhausted
from foveate.telemetry import conventions as names
from foveate.video import ContextTimings, VideoFacts
from verifier_svc.config import VerifierConfig
from verifier_svc.contexts import ContextFacts
from verifier_svc.decoders import Decoders, IsolatedVideo
from verifier_svc.engine_parts import EngineParts
from verifier_svc.media import Media
from verifier_svc.memory import Memory, SlabLease
from verifier_svc.progress import ProgressBoard, Stage
from verifier_svc.timeline import FramePlan, FrameSampling
from verifier_svc.workers import iterate_in_worker

# Name of the tensor that holds a context's processed patches.
PATCHES = "patches"


@dataclass(frozen=True)
class _PatchChunk:
    """Patches of consecutive frames, with their times; decode and processing time in milliseconds."""

    patches: Tensor  # [num_patches, patch_width]
    grid: Grid
    timestamps_s: tuple[float, ...]
    decode_ms: float
    process_ms: float


@dataclass(frozen=True)
class EncodedVideo:
    """A whole video in the model's embedding space: all that the text model's prefill needs of it."""

    features: Tensor  # [num_visual_tokens, width], as Family.encode_video
    patches: Tensor | None  # [num_patches, patch_width], when they are kept
    grid: Grid
    video: VideoFacts
    decode_ms: float
    encode_ms: float


@dataclass(frozen=True)
class _Target:
    """Where a context's rows go: its KV and, unless None, the hidden states of its visual rows."""

    slab: Slab
    visual_states: TensorSlab | None


@dataclass(frozen=True)
class _Source:
    """A context's tokens, its video in place of the placeholders among them, and their positions [3, num_tokens].

    `visual_rows` int64 [num_visual_tokens], ascending, are the rows of the features.
    """

    token_ids: Sequence[int]
    visual_rows: Tensor
    features: Tensor
    positions: Tensor


@dataclass(frozen=True)
class ContextIdentity:
    """Which context is being made, of which file, for whom."""

    context_id: str
    tenant: str
    media_sha256: str
    media_bytes: int
    sampling: FrameSampling


@dataclass(frozen=True)
class Prefilled:
    """A context in a slab that is on its maker's lease; `tensors` belong to it beside its keys and values."""

    facts: ContextFacts
    slab: Slab
    tensors: Mapping[str, TensorSlab]


class Prefiller:
    """Encodes and prefills videos. Work of one video is split into device steps short enough to let rounds through."""

    def __init__(
        self,
        parts: EngineParts,
        config: VerifierConfig,
        *,
        scheduler: Scheduler,
        workers: Executor,
        memory: Memory,
    ) -> None:
        self._parts = parts
        self._config = config
        self._scheduler = scheduler
        self._device = scheduler.device
        self._workers = workers
        self._memory = memory
        self._decoders = Decoders(config.media, num_threads=config.num_threads, num_spares=config.num_spare_decoders)

    def open_video(self, media: Media) -> IsolatedVideo:
        """Tells the container format; INVALID_ARGUMENT when it is none of ours."""
        return self._decoders.open(media)

    def close(self) -> None:
        """Ends the spare decoders."""
        self._decoders.close()

    def refuse_by_claims(self, video: IsolatedVideo, sampling: FrameSampling) -> None:
        """Reads the headers and refuses what is too large by them, before anything is hashed, decoded or computed."""
        facts = video.facts()
        by_time = int(facts.claimed_duration_s * sampling.fps)
        num_frames = min(sampling.max_frames, by_time, facts.claimed_num_frames or by_time)
        if num_frames:
            self._check_tokens(self._plan_grid(num_frames, facts.width, facts.height))

    async def encode(self, media: Media, sampling: FrameSampling, board: ProgressBoard) -> EncodedVideo:
        """Decodes the frames of a video and runs them through the vision tower."""
        loop = asyncio.get_running_loop()
        video = self.open_video(media)
        facts = await loop.run_in_executor(self._workers, video.facts)
        timeline = await loop.run_in_executor(self._workers, video.timeline)
        plan = timeline.plan(sampling)
        self._check_tokens(self._plan_grid(plan.num_frames, facts.width, facts.height))
        board.report(Stage.DECODE, 0, plan.num_frames)
        features: list[Tensor] = []
        patches: list[Tensor] = []
        grids: list[Grid] = []
        times: list[float] = []
        decode_ms = encode_ms = 0.0
        pace = self._pace(first=1, most=self._config.encode_chunk_patches)
        async with contextlib.aclosing(iterate_in_worker(self._workers, self._patches(video, plan))) as chunks:
            async for chunk in chunks:
                times.extend(chunk.timestamps_s)
                board.report(Stage.DECODE, len(times), plan.num_frames)
                attributes = {names.NUM_FRAMES: len(chunk.timestamps_s)}
                took_ms = await self._scheduler.turns(
                    self._encode_chunk(chunk, pace, features), names.SPAN_ENCODE, attributes
                )
                if self._config.keep_patches:
                    patches.append(chunk.patches.to(self._parts.loaded.dtype))
                grids.append(chunk.grid)
                decode_ms += chunk.decode_ms
                encode_ms += chunk.process_ms + took_ms
                board.report(Stage.ENCODE, len(times), plan.num_frames)
        grid = Grid(sum(one.num_temporal for one in grids), grids[0].num_rows, grids[0].num_columns)
        kept = torch.cat(patches) if patches else None
        video_facts = VideoFacts(
            duration_s=plan.duration_s,
            num_frames=len(times),
            sampled_fps=plan.sampled_fps,
            frame_timestamps_s=tuple(times),
            width=facts.width,
            height=facts.height,
        )
        loaded = self._parts.loaded
        whole = await self._device.run(loaded.family.join_video, loaded.model, features)
        return EncodedVideo(whole, kept, grid, video_facts, decode_ms, encode_ms)

    def _patches(self, video: IsolatedVideo, plan: FramePlan) -> Generator[_PatchChunk, None, None]:
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

    def _pace(self, *, first: int, most: int) -> Pace:
        # Only the compiled kernel's bits do not depend on how a prompt is cut.
        return Pace(first=first, most=most, is_fixed=self._parts.runner.max_rows is None)

    def _encode_chunk(self, chunk: _PatchChunk, pace: Pace, features: list[Tensor]) -> Turns[float]:
        """Appends the embeddings of a chunk, cut between frames, which do not see each other; returns milliseconds."""
        before_s, grid = pace.total_s, chunk.grid
        num_per_step = grid.num_rows * grid.num_columns
        start = 0
        while start < grid.num_temporal:
            turn_s = yield (grid.num_temporal - start) * num_per_step
            num_steps = pace.num_rows(turn_s, grid.num_temporal - start)
            with pace.piece(num_steps):
                patches = chunk.patches[start * num_per_step : (start + num_steps) * num_per_step]
                features.append(self._encode(patches, Grid(num_steps, grid.num_rows, grid.num_columns)))
            start += num_steps
        return (pace.total_s - before_s) * 1e3

    def _encode(self, patches: Tensor, grid: Grid) -> Tensor:
        loaded = self._parts.loaded
        patches = patches.to(device=loaded.device, dtype=loaded.dtype)
        features = loaded.family.encode_video(loaded.model, patches, grid.as_tensor().to(loaded.device))
        return features.to(loaded.device)

    @property
    def tensor_names(self) -> frozenset[str]:
        """What `prefill_text` keeps beside keys and values; a copy without it is of no use here."""
        names = set()
        if self._config.keep_visual_states:
            names.add(self._parts.relevance.tensor_name)
        if self._config.keep_patches:
            names.add(PATCHES)
        return frozenset(names)

    async def prefill_text(
        self, encoded: EncodedVideo, identity: ContextIdentity, lease: SlabLease, board: ProgressBoard
    ) -> Prefilled:
        """Runs the text model over system prompt and video, into a slab that stays on `lease`."""
        parts, num_visual = self._parts, encoded.features.shape[0]
        family, grid = parts.loaded.family, encoded.grid.shape
        token_ids = parts.context_token_ids(grid, encoded.video.frame_timestamps_s)
        spans = visual_spans(token_ids, (family.video_token_id,))
        second_per_grid = parts.frames.temporal_patch / encoded.video.sampled_fps
        positions = family.positions(token_ids, [grid], [second_per_grid])
        slab = await self._memory.take(lease, len(token_ids))
        target = _Target(slab, await self._take_visual_states(lease, num_visual))
        step_tokens = self._config.prefill_chunk_tokens
        pace = self._pace(first=first_rows(step_tokens), most=min(step_tokens, parts.runner.max_rows or step_tokens))
        source = _Source(token_ids, visual_index(spans), encoded.features, positions.ids)
        board.report(Stage.PREFILL, 0, len(token_ids))
        for start in range(0, len(token_ids), step_tokens):
            rows = range(start, min(start + step_tokens, len(token_ids)))
            prefill = self._prefill_chunk(target, source, rows, pace)
            await self._scheduler.turns(prefill, names.SPAN_PREFILL, {names.NUM_TOKENS: len(rows)})
            board.report(Stage.PREFILL, rows.stop, len(token_ids))
        tensors = await self._finish_visual_states(target) | await self._keep_patches(lease, encoded.patches)
        facts = ContextFacts(
            context_id=identity.context_id,
            num_tokens=len(token_ids),
            visual_spans=spans,
            position_delta=positions.next_position - len(token_ids),
            grid=grid,
            second_per_grid=second_per_grid,
            video=encoded.video,
            timings=ContextTimings(encoded.decode_ms, encoded.encode_ms, pace.total_s * 1e3),
            kv_bytes=whole_pages(parts.pool.layout.slab_bytes(slab.capacity))
            + sum(whole_pages(tensor.num_bytes) for tensor in tensors.values()),
            create_time_ns=time.time_ns(),
            tenant=identity.tenant,
            media_sha256=identity.media_sha256,
            media_bytes=identity.media_bytes,
            sampling=identity.sampling,
        )
        return Prefilled(facts, slab, tensors)

    async def _take_visual_states(self, lease: SlabLease, num_visual: int) -> TensorSlab | None:
        if not self._config.keep_visual_states:
            return None
        shape = (1 + num_visual, self._parts.runner.hidden_size)
        return await self._memory.take_tensor(lease, shape, self._parts.loaded.dtype)

    async def _finish_visual_states(self, target: _Target) -> dict[str, TensorSlab]:
        """Turns the states that the chunks have written into what relevance compares with; returns it by name."""
        if target.visual_states is None:
            return {}
        settings, slab = self._parts.relevance, target.visual_states

        def finish() -> None:
            table = self._parts.pool.tensor_view(slab)
            table.copy_(settings.visual_table(table[1:]))

        await self._device.run(finish)
        return {settings.tensor_name: slab}

    async def _keep_patches(self, lease: SlabLease, patches: Tensor | None) -> dict[str, TensorSlab]:
        if patches is None:
            return {}
        slab = await self._memory.take_tensor(lease, tuple(patches.shape), patches.dtype)
        await self._device.run(lambda: self._parts.pool.tensor_view(slab).copy_(patches))
        return {PATCHES: slab}

    def _prefill_chunk(self, target: _Target, source: _Source, rows: range, pace: Pace) -> Turns[None]:
        """Runs rows of the context through the text model into its slab."""
        row = rows.start
        while row < rows.stop:
            turn_s = yield len(source.token_ids) - row
            num_rows = pace.num_rows(turn_s, rows.stop - row)
            with pace.piece(num_rows):
                self._prefill_rows(target, source, range(row, row + num_rows))
            row += num_rows

    @torch.inference_mode()
    def _prefill_rows(self, target: _Target, source: _Source, rows: range) -> None:
        runner, pool = self._parts.runner, self._parts.pool
        embeds = runner.embed(source.token_ids[rows.start : rows.stop]).clone()
        first, last = torch.searchsorted(source.visual_rows, torch.tensor([rows.start, rows.stop])).tolist()
        there = slice(first, last)
        here = (source.visual_rows[there] - rows.start).to(embeds.device)
        added = place_features(embeds, here, source.features[there])
        kv = KvView(context=None, thread=pool.views(target.slab), thread_len=rows.start)
        keeps_states = target.visual_states is not None and first < last
        layer = self._parts.relevance.layer if keeps_states else None
        positions = source.positions[:, rows.start : rows.stop]
        block = Block(kv, embeds=embeds, positions=positions, states_layer=layer, added=added)
        (output,) = runner.run([block])
        if target.visual_states is not None and output.states is not None:
            pool.tensor_view(target.visual_states)[1:][there] = output.states[here]
        if self._parts.loaded.device.type == "cuda":
            torch.cuda.synchronize(self._parts.loaded.device)

    def _plan_grid(self, num_frames: int, width: int, height: int) -> Grid:
        return self._parts.frames.plan(num_frames=num_frames, height=height, width=width)

    def _check_tokens(self, grid: Grid) -> None:
        needed = self._parts.loaded.family.num_visual_tokens(grid.shape)
        limit = self._config.media.max_visual_tokens
        if needed > limit:
            raise ResourceExhausted(
                f"the video needs {needed} visual tokens; the limit is {limit}: ask for a lower fps or fewer frames",
                reason="TOO_MANY_VISUAL_TOKENS",
                metadata={"needed_tokens": str(needed), "limit_tokens": str(limit)},
            )
        self._memory.refuse_if_too_large(needed)


def whole_pages(num_bytes: int) -> int:
    """Returns the bytes that a slab of `num_bytes` takes in the pool."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
