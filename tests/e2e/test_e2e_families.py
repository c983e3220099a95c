"""Every family through both services: drafted = plain = transformers' own `generate`, for every kind of drafts.

Tiny random models behind real gRPC, in this process; two verifiers share a Redis, so that contexts come back too.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from bench.redis_server import RedisServer
from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import Drafter
from drafter_svc.main import SERVICE_NAME
from drafter_svc.servicer import DrafterServicer
from engine.device_thread import DeviceThread
from foveate.context_source import ContextSource
from foveate.rpc.channel import open_channel
from foveate.rpc.server import Server, ServiceRegistration, running
from foveate.store import keys
from foveate.v1 import answers_pb2, contexts_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2
from tests.kernels import KERNEL_CACHE
from tests.unit.drafter_svc.stream import opened_with
from tests.unit.engine.tiny_model import FAMILIES, write_tiny_checkpoint
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.cold_bench import is_written
from tests.unit.verifier_svc.serving import Served, config_for, serving
from tests.unit.verifier_svc.serving import Stream as VerifierStream
from verifier_svc.config import ColdConfig

CLIP = clips.clip(7, fps=4)
QUESTION = "What happens?"
NUM_TOKENS = 24
KINDS = {
    "sparse": answers_pb2.DRAFT_MODE_SPARSE,
    "streaming": answers_pb2.DRAFT_MODE_STREAMING,
    "layerskip": answers_pb2.DRAFT_MODE_LAYERSKIP,
    "small": answers_pb2.DRAFT_MODE_SMALL,
}


@dataclass(frozen=True)
class Pair:
    """A verifier and a drafter of one family."""

    folder: Path
    verifier: Served
    other_verifier: Served
    drafter: drafter_pb2_grpc.DrafterServiceAsyncStub
    context: contexts_pb2.Context


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model wide enough for the compiled kernel, and a smaller one with another padding of the vocabulary (S4)."""
    models = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"model_type": request.param, "spread": 0.25, "head_dim": 32, "num_kv_heads": 2}
    write_tiny_checkpoint(models / "small", **shape, num_layers=1, num_heads=2, vocab_multiple=8, seed=1)
    return write_tiny_checkpoint(models / "target", **shape, num_layers=3, num_heads=4, vocab_multiple=128)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@contextlib.asynccontextmanager
async def drafting(config: DrafterConfig) -> AsyncIterator[drafter_pb2_grpc.DrafterServiceAsyncStub]:
    """Serves a drafter for the length of the block."""
    device = DeviceThread()
    drafter, servicer = await Drafter.load(config, device), DrafterServicer()
    servicer.serve(drafter)
    registration = ServiceRegistration(
        SERVICE_NAME, lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server)
    )
    try:
        async with running(Server([registration], address="127.0.0.1:0"), grace_s=0) as server:
            await server.set_serving(True)
            async with open_channel(f"127.0.0.1:{server.port}") as channel:
                stub: Any = drafter_pb2_grpc.DrafterServiceStub(channel)
                yield stub
    finally:
        await drafter.close()
        device.close()


@pytest.fixture
async def pair(folder: Path, redis_server: RedisServer) -> AsyncIterator[Pair]:
    cold = ColdConfig(redis=redis_server.settings(), num_connections=2)
    config = config_for(folder, cold=cold, keep_patches=True)
    small = DrafterConfig(folder, small_model_path=folder.parent / "small", kernel_cache=KERNEL_CACHE)
    async with serving(config) as verifier, serving(config_for(folder, cold=cold)) as other, drafting(small) as drafter:
        context = await verifier.prefill(CLIP, fps=4)
        yield Pair(folder, verifier, other, drafter, context)


def draft_message(opened: verifier_pb2.SequenceOpened, kind: str) -> drafter_pb2.OpenDraft:
    """What a gateway sends a drafter of a sequence."""
    is_small = kind == "small"
    message = drafter_pb2.OpenDraft(mode=KINDS[kind], visual_budget=0.3, max_tokens=40)
    for name in ("sequence_id", "num_context_tokens", "num_prompt_tokens", "position_delta"):
        setattr(message, name, getattr(opened, name))
    for name in ("kv_handle", "context", "thread", *(("selection",) if opened.HasField("selection") else ())):
        getattr(message, name).CopyFrom(getattr(opened, name))
    message.visual_spans.extend(opened.visual_spans)
    if is_small:
        message.video.CopyFrom(opened.video)
        message.prompt_token_ids.extend(opened.prompt_token_ids)
    return message


async def drafted(pair: Pair, kind: str) -> tuple[list[int], int]:
    """The answer with a kind's drafts, and how many tokens it drafted."""
    fields: dict[str, Any] = {}
    if kind in ("sparse", "small"):
        fields["visual_budget"] = 0.3
    if kind == "small":
        fields |= {"wants_video": True, "selection": answers_pb2.SELECTION_METHOD_TWO_STAGE}
    num_drafted = 0
    async with contextlib.AsyncExitStack() as open_streams:
        stream = await open_streams.enter_async_context(pair.verifier.answering(pair.context.name, QUESTION, **fields))
        message = draft_message(stream.opened, kind)
        drafts, _ = await open_streams.enter_async_context(opened_with(pair.drafter, message))
        base_len, pending = stream.opened.num_prompt_tokens, [stream.opened.first_token_id]
        tokens, number = list(pending), 0
        while len(tokens) < NUM_TOKENS:
            number += 1
            asked = drafter_pb2.DraftRound(
                sequence_id=stream.opened.sequence_id,
                round=number,
                base_len=base_len,
                token_ids=pending,
                num_draft_tokens=4,
            )
            proposed = list((await drafts.ask(round=asked)).drafted.draft_token_ids)
            num_drafted += len(proposed)
            targets = await stream.round(base_len, pending, proposed)
            matches = [draft == target for draft, target in zip(proposed, targets, strict=False)]
            accepted = matches.index(False) if False in matches else len(proposed)
            base_len += len(pending) + accepted
            pending = [targets[accepted]]
            tokens += targets[: accepted + 1]
    return tokens[:NUM_TOKENS], num_drafted


def by_transformers(pair: Pair, stream: VerifierStream) -> list[int]:
    """Greedy tokens of transformers' `generate`, given the release's prompt and positions."""
    parts = pair.verifier.verifier.parts
    family = parts.loaded.family
    model = AutoModelForImageTextToText.from_pretrained(pair.folder, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    with av.open(io.BytesIO(CLIP)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    video = parts.loaded.processor.video_processor(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    inputs: dict[str, Any] = {"pixel_values_videos": video["pixel_values_videos"]}
    grid = parts.frames.plan(num_frames=len(frames), height=frames.shape[1], width=frames.shape[2]).shape
    token_ids = [
        *parts.context_token_ids(grid, list(pair.context.video.frame_timestamps_s)),
        *stream.opened.prompt_token_ids,
    ]
    if "video_grid_thw" in video:
        assert tuple(video["video_grid_thw"][0].tolist()) == grid
        positions = family.positions(token_ids, [grid], [parts.frames.temporal_patch / 4.0]).ids
        is_visual = torch.tensor([token_ids]) == family.video_token_id
        inputs |= {"video_grid_thw": video["video_grid_thw"], "mm_token_type_ids": torch.where(is_visual, 2, 0)}
        inputs["position_ids"] = positions.unsqueeze(1)
    out = model.generate(
        input_ids=torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        suppress_tokens=[*family.placeholder_token_ids, *range(parts.vocab_size, model.lm_head.weight.shape[0])],
        pad_token_id=0,
        **inputs,
    )
    return out[0, len(token_ids) :].tolist()


async def test_drafted_is_plain_is_transformers_own(pair: Pair) -> None:
    async with pair.verifier.answering(pair.context.name, QUESTION) as stream:
        plain = await stream.plain(NUM_TOKENS)
        assert plain == by_transformers(pair, stream)
    assert len(set(plain)) > 4
    assert pair.verifier.verifier.parts.vocab_size <= 264 < 384
    for kind in KINDS:
        tokens, num_drafted = await drafted(pair, kind)
        assert (kind, tokens) == (kind, plain)
        assert num_drafted >= NUM_TOKENS // 2


async def test_contexts_come_back_from_the_cold_tier(pair: Pair, redis_server: RedisServer) -> None:
    await is_written(pair.verifier)
    async with pair.verifier.answering(pair.context.name, QUESTION) as stream:
        plain = await stream.plain(NUM_TOKENS)
        spans = list(stream.opened.visual_spans)
    context_id = pair.context.name.removeprefix("contexts/")
    with redis_server.client() as store:
        for source in (ContextSource.COLD_KV, ContextSource.COLD_EMBEDDINGS):
            async with pair.other_verifier.answering(pair.context.name, QUESTION) as stream:
                assert stream.opened.fetch.source == source
                assert list(stream.opened.visual_spans) == spans
                assert await stream.plain(NUM_TOKENS) == plain
            pair.other_verifier.verifier.contexts.release(context_id)
            store.delete(keys.manifest(context_id, "kv"))
