"""Making contexts over gRPC: uploads, paths, sharing, limits, eviction, cancellation, and health throughout.

Cases V1 (short clips), V2 (bad files, then the next request), V6 (too many tokens, no request lifts a ceiling),
G6 (health during a long forward, and while loading).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2

from foveate.rpc.errors import FoveateError, InvalidArgument, NotFound, ResourceExhausted, from_rpc_error
from foveate.rpc.server import Server, ServiceRegistration, running
from foveate.v1 import contexts_pb2, verifier_pb2, verifier_pb2_grpc
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Served, config_for, named, serving, upload
from verifier_svc.main import SERVICE_NAME
from verifier_svc.servicer import VerifierServicer

CLIP = clips.clip(9, fps=4)


@pytest.fixture
async def served(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "clip.mp4").write_bytes(CLIP)
    (tmp_path / "secret.mp4").write_bytes(CLIP)
    (tmp_path / "media" / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    config = config_for(checkpoint, media_root=tmp_path / "media", media={"max_visual_tokens": 700})
    async with serving(config) as served:
        yield served


async def test_an_upload_becomes_a_context(served: Served) -> None:
    events = await served.prefill_events(upload(CLIP, fps=4))
    stages = [event.progress.stage for event in events[:-1]]
    assert stages == sorted(stages)
    assert set(stages) == {
        contexts_pb2.CONTEXT_STAGE_UPLOAD,
        contexts_pb2.CONTEXT_STAGE_DECODE,
        contexts_pb2.CONTEXT_STAGE_ENCODE,
        contexts_pb2.CONTEXT_STAGE_PREFILL,
    }
    assert all(event.progress.done <= event.progress.total for event in events[:-1])
    context = events[-1].context
    assert (context.video.num_frames, context.video.sampled_fps, context.video.duration_s) == (9, 4.0, 2.25)
    assert list(context.video.frame_timestamps_s) == [index / 4 for index in range(9)]
    assert (context.video.width, context.video.height) == (64, 48)
    assert context.num_visual_tokens == 5 * 12
    assert context.kv_bytes == await served.used_bytes()
    assert context.timings.prefill_ms > 0
    assert not context.reused
    assert abs(context.create_time.ToSeconds() - time.time()) < 60


async def test_the_same_video_is_found_again_however_it_comes(served: Served) -> None:
    first = await served.prefill(CLIP, fps=4)
    for requests in (upload(CLIP, fps=4), named("clip.mp4", fps=4), upload(CLIP, fps=4, max_frames=10**9)):
        again = (await served.prefill_events(requests))[-1].context
        assert (again.name, again.reused) == (first.name, True)
        assert again.create_time == first.create_time
    others = [
        await served.prefill(CLIP, fps=2),
        await served.prefill(CLIP, fps=4, max_frames=8),
        await served.prefill(clips.clip(9, fps=4, seed=1), fps=4),
    ]
    assert len({first.name, *(other.name for other in others)}) == 4
    listed = await served.stub.ListHeldContexts(verifier_pb2.ListHeldContextsRequest())
    assert [context.name for context in listed.contexts] == [other.name for other in reversed([first, *others])]


@pytest.mark.parametrize("num_frames", [1, 2, 3, 9, 26])
async def test_short_clips(served: Served, num_frames: int) -> None:
    context = await served.prefill(clips.clip(num_frames), fps=60, max_frames=32)
    assert context.video.num_frames == num_frames
    assert context.num_visual_tokens == 12 * -(-num_frames // 2)
    async with served.answering(context.name) as stream:
        assert len(await stream.plain(3)) == 3


async def test_two_callers_share_one_prefill_and_one_may_leave(served: Served) -> None:
    served.verifier.device.submit(time.sleep, 0.2)  # both are there before the device begins
    calls = [served.stub.Prefill(upload(CLIP, fps=4)) for _ in range(3)]

    async def context_of(call: grpc.aio.StreamStreamCall[object, verifier_pb2.PrefillResponse]) -> contexts_pb2.Context:
        return [response async for response in call][-1].context

    waiting = [asyncio.create_task(context_of(call)) for call in calls]
    await asyncio.sleep(0.15)
    calls[0].cancel()
    contexts = await asyncio.gather(*waiting[1:])
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert len({(one.name, one.create_time.ToNanoseconds()) for one in contexts}) == 1
    num_slabs = await served.verifier.device.run(lambda: served.verifier.parts.pool.num_slabs)
    assert num_slabs == served.verifier.contexts.num_slabs == 2  # one context: its KV and its visual states


async def test_bad_files_are_refused_and_the_next_request_is_served(served: Served) -> None:
    for kind, data in clips.NOT_VIDEOS.items():
        with pytest.raises(InvalidArgument) as caught:
            await served.prefill_events(upload(data))
        assert caught.value.violations, kind
    cut = clips.index_first(clips.BIKES)
    cut = cut[: len(cut) * 8 // 10]
    assert (await served.prefill(cut, fps=1, max_frames=4)).video.num_frames == 4
    with pytest.raises(InvalidArgument):
        await served.prefill(clips.BIKES.read_bytes()[:400_000])
    with pytest.raises(InvalidArgument):
        await served.prefill(clips.audio_only())
    assert (await served.prefill(CLIP)).num_visual_tokens > 0
    health = await served.health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def chunk(data: bytes, offset: int) -> verifier_pb2.PrefillRequest:
    return verifier_pb2.PrefillRequest(chunk=contexts_pb2.MediaChunk(write_offset=offset, data=data))


def bad_requests() -> list[tuple[list[verifier_pb2.PrefillRequest], type[FoveateError], str]]:
    spec = next(upload(b"", total_bytes=0))
    return [
        ([], InvalidArgument, "spec"),
        ([chunk(b"x", 0)], InvalidArgument, "spec"),
        ([verifier_pb2.PrefillRequest(spec=contexts_pb2.ContextSpec())], InvalidArgument, "spec.source"),
        ([spec], InvalidArgument, "chunk.data"),
        ([spec, spec], InvalidArgument, "chunk"),
        ([spec, chunk(b"x", 1)], InvalidArgument, "chunk.write_offset"),
        ([spec, chunk(b"x" * 1048577, 0)], InvalidArgument, "chunk.data"),
        (list(upload(CLIP, total_bytes=len(CLIP) + 1)), InvalidArgument, "spec.upload.total_bytes"),
        (list(upload(CLIP, fps=0)), InvalidArgument, "spec.sampling.fps"),
        (list(upload(CLIP, fps=61)), InvalidArgument, "spec.sampling.fps"),
        (list(upload(CLIP, max_frames=0)), InvalidArgument, "spec.sampling.max_frames"),
        (named("../secret.mp4"), InvalidArgument, "spec.path"),
        (named("link.mp4"), InvalidArgument, "spec.path"),
        (named(""), InvalidArgument, "spec.path"),
        (named("none.mp4"), NotFound, ""),
        (list(upload(b"x", total_bytes=4 << 30)), ResourceExhausted, ""),
        ([spec, *(chunk(bytes(1 << 20), at << 20) for at in range(9))], ResourceExhausted, ""),
    ]


@pytest.mark.parametrize(("requests", "kind", "field"), bad_requests())
async def test_bad_requests(
    served: Served, requests: list[verifier_pb2.PrefillRequest], kind: type[FoveateError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        await served.prefill_events(requests)
    assert [violation.field for violation in caught.value.violations] == ([field] if field else [])
    assert (await served.prefill(CLIP)).num_visual_tokens > 0


async def test_too_many_visual_tokens_are_refused_at_once(served: Served) -> None:
    data = clips.clip(200, fps=25, size=(96, 96))  # 100 steps of 36 tokens
    before = time.monotonic()
    with pytest.raises(ResourceExhausted) as caught:
        await served.prefill(data, fps=25)
    assert time.monotonic() - before < 5  # well under a second on a machine that does nothing else
    assert caught.value.reason == "TOO_MANY_VISUAL_TOKENS"
    assert caught.value.metadata == {"needed_tokens": "3600", "limit_tokens": "700"}
    assert (await served.prefill(data, fps=25, max_frames=38)).num_visual_tokens == 684


async def test_no_request_lifts_the_servers_ceiling(checkpoint: Path) -> None:
    async with serving(config_for(checkpoint, media={"max_frames": 5})) as served:
        context = await served.prefill(CLIP, fps=60, max_frames=2**32 - 1)
        assert context.video.num_frames == 5


async def test_idle_contexts_make_room_and_a_question_on_one_that_went_is_told(checkpoint: Path) -> None:
    bytes_per_token = 2 * 2 * 2 * 16 * 4
    # A header page, two contexts of 112 tokens and a thread of 64.
    pool_bytes = 4096 + (2 * 112 + 64) * bytes_per_token
    async with serving(config_for(checkpoint, pool_bytes=pool_bytes, keep_visual_states=False)) as served:
        first, second = await served.prefill(CLIP, fps=4), await served.prefill(clips.clip(9, seed=1), fps=4)
        async with served.answering(second.name, max_tokens=1) as stream:
            third = await served.prefill(clips.clip(9, seed=2), fps=4)
            assert len(await stream.plain(2)) == 2
        listed = await served.stub.ListHeldContexts(verifier_pb2.ListHeldContextsRequest())
        assert {context.name for context in listed.contexts} == {second.name, third.name}
        with pytest.raises(NotFound):
            async with served.answering(first.name):
                pass
        with pytest.raises(ResourceExhausted) as caught:
            await served.prefill(clips.clip(60, seed=3), fps=4)
        assert caught.value.reason == "POOL_FULL"


async def test_release_waits_for_the_answers_that_use_it(served: Served) -> None:
    context = await served.prefill(CLIP, fps=4)
    async with served.answering(context.name) as stream:
        await served.stub.ReleaseContext(verifier_pb2.ReleaseContextRequest(name=context.name))
        assert len(await stream.plain(5)) == 5
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.ReleaseContext(verifier_pb2.ReleaseContextRequest(name=context.name))
        assert isinstance(from_rpc_error(caught.value), NotFound)
    for _ in range(100):
        if await served.used_bytes() == 0:
            break
        await asyncio.sleep(0.01)
    assert await served.used_bytes() == 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.ReleaseContext(verifier_pb2.ReleaseContextRequest(name="contexts/x"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "stage", ["CONTEXT_STAGE_UPLOAD", "CONTEXT_STAGE_DECODE", "CONTEXT_STAGE_ENCODE", "CONTEXT_STAGE_PREFILL"]
)
async def test_a_cancelled_prefill_leaves_nothing(checkpoint: Path, stage: str) -> None:
    config = config_for(checkpoint, prefill_chunk_tokens=16, encode_chunk_patches=100)
    async with serving(config) as served:
        call = served.stub.Prefill()
        for request in upload(clips.clip(200, fps=25), fps=25):
            await call.write(request)
        if stage != "CONTEXT_STAGE_UPLOAD":
            await call.done_writing()
        async for response in call:
            if response.progress.stage == contexts_pb2.ContextStage.Value(stage):
                break
        call.cancel()
        for _ in range(300):
            if served.verifier.num_prefills == 0:
                break
            await asyncio.sleep(0.01)
        assert (served.verifier.num_prefills, await served.used_bytes()) == (0, 0)
        assert served.verifier.contexts.newest_first() == []
        assert (await served.prefill(CLIP)).num_visual_tokens > 0


async def test_rounds_go_on_during_a_prefill(checkpoint: Path) -> None:
    async with serving(config_for(checkpoint, prefill_chunk_tokens=64, encode_chunk_patches=200)) as served:
        context = await served.prefill(CLIP, fps=4)
        async with served.answering(context.name) as stream:
            prefill = asyncio.create_task(served.prefill(clips.clip(300, fps=25), fps=25))
            num_rounds = 0
            tokens = [stream.opened.first_token_id]
            while not prefill.done() and num_rounds < 40:
                tokens += await stream.round(stream.opened.num_prompt_tokens + num_rounds, tokens[-1:])
                num_rounds += 1
            assert num_rounds > 5
            assert (await prefill).num_visual_tokens == 1800


async def test_health_answers_during_a_long_forward(served: Served) -> None:
    is_done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def forward() -> None:
        matrix = torch.ones(1200, 1200)
        before = time.monotonic()
        while time.monotonic() - before < 1.5:
            matrix = (matrix @ matrix).clamp_(0, 1)
        loop.call_soon_threadsafe(is_done.set)

    served.verifier.device.submit(forward)
    waits_s = []
    while not is_done.is_set():
        before = time.monotonic()
        health = await served.health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        info = await served.stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest())
        waits_s.append(time.monotonic() - before)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert info.num_sequences == 0
        await asyncio.sleep(0.02)
    assert len(waits_s) > 5
    assert max(waits_s) < 0.2


async def test_info_and_tokenizer(served: Served, checkpoint: Path) -> None:
    info = await served.stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest())
    parts = served.verifier.parts
    assert (info.model, info.model_fingerprint) == ("tiny", parts.loaded.fingerprint)
    assert (info.device, info.deterministic, info.attention_kernel) == ("cpu", False, parts.runner.kernel_name)
    assert info.kv_handle.shm.path.startswith("/dev/shm/")
    assert list(info.eos_token_ids) == list(parts.loaded.eos_token_ids)
    assert (info.limits.max_visual_tokens, info.limits.max_draft_tokens, info.limits.default_fps) == (700, 16, 2.0)
    pieces = [piece.data async for piece in served.stub.GetTokenizer(verifier_pb2.GetTokenizerRequest())]
    assert b"".join(pieces) == (checkpoint / "tokenizer.json").read_bytes()


async def test_nothing_is_served_while_loading() -> None:
    servicer = VerifierServicer()
    registration = ServiceRegistration(
        SERVICE_NAME, lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)
    )
    async with (
        running(Server([registration], address="127.0.0.1:0"), grace_s=0.1) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Verify(iter([])).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
