"""Creations by request id on a real verifier: resumed uploads, requests sent twice, digests, watching."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import grpc
import pytest

from foveate.rpc.errors import FailedPrecondition, FoveateError, InvalidArgument, NotFound, from_rpc_error
from foveate.v1 import contexts_pb2, verifier_pb2
from tests.fakes import until
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Served, config_for, serving
from verifier_svc.creations import Creations
from verifier_svc.media import UploadSpool

CLIP = clips.clip(9, fps=4)
SHA256 = hashlib.sha256(CLIP).hexdigest()
HALF = len(CLIP) // 2
UPLOAD = contexts_pb2.CONTEXT_STAGE_UPLOAD


@pytest.fixture
async def served(checkpoint: Path) -> AsyncIterator[Served]:
    async with serving(config_for(checkpoint)) as served:
        yield served


def spec(request_id: str = "r1", *, tenant: str = "", sha256: str = "", fps: float = 4) -> verifier_pb2.PrefillRequest:
    upload = contexts_pb2.Upload(total_bytes=len(CLIP), sha256=sha256)
    sampling = contexts_pb2.FrameSampling(fps=fps)
    asked = contexts_pb2.ContextSpec(upload=upload, sampling=sampling, request_id=request_id)
    return verifier_pb2.PrefillRequest(spec=asked, tenant=tenant)


def chunk(start: int, stop: int | None = None) -> verifier_pb2.PrefillRequest:
    return verifier_pb2.PrefillRequest(chunk=contexts_pb2.MediaChunk(write_offset=start, data=CLIP[start:stop]))


async def break_off(served: Served, *requests: verifier_pb2.PrefillRequest) -> int:
    """Sends requests, cancels when the verifier has them, and returns how many bytes it said it had at first."""
    call = served.stub.Prefill()
    for request in requests:
        await call.write(request)
    first = await call.read()
    await asyncio.sleep(0.2)
    call.cancel()
    await asyncio.sleep(0.1)
    assert first.progress.stage == UPLOAD
    return int(first.progress.done)


async def events(served: Served, requests: Iterable[verifier_pb2.PrefillRequest]) -> list[verifier_pb2.PrefillResponse]:
    return await served.prefill_events(requests)


async def test_an_upload_goes_on_where_it_broke_off(served: Served) -> None:
    assert await break_off(served, spec(), chunk(0, HALF)) == 0
    responses = await events(served, [spec(), chunk(HALF)])
    assert (responses[0].progress.stage, responses[0].progress.done) == (UPLOAD, HALF)
    assert responses[-1].context.media_sha256 == SHA256
    plain = await served.prefill(CLIP, fps=4)
    assert plain.name == responses[-1].context.name


async def test_it_may_start_over_and_may_not_leave_a_gap(served: Served) -> None:
    await break_off(served, spec(), chunk(0, HALF))
    with pytest.raises(InvalidArgument) as caught:
        await events(served, [spec(), chunk(HALF + 1)])
    assert str(HALF) in str(caught.value)
    await break_off(served, spec(), chunk(0, HALF))
    assert (await events(served, [spec(), chunk(0)]))[-1].context.media_sha256 == SHA256


async def test_a_request_sent_twice_needs_no_second_upload(served: Served) -> None:
    first = (await events(served, [spec(), chunk(0)]))[-1].context
    again = (await events(served, [spec()]))[-1].context
    assert (again.name, again.reused) == (first.name, True)
    served.verifier.contexts.release(first.name.removeprefix("contexts/"))
    with pytest.raises(InvalidArgument):  # it is gone: the bytes are needed again
        await events(served, [spec()])
    assert (await events(served, [spec(), chunk(0)]))[-1].context.name == first.name


async def test_an_id_belongs_to_one_request_of_one_tenant(served: Served) -> None:
    first = (await events(served, [spec(), chunk(0)]))[-1].context
    for other in (spec(fps=2), spec(sha256=SHA256)):
        with pytest.raises(InvalidArgument) as caught:
            await events(served, [other, chunk(0)])
        assert caught.value.violations[0].field == "spec.request_id"
    theirs = (await events(served, [spec(tenant="them"), chunk(0)]))[-1].context
    assert theirs.name != first.name
    assert not theirs.reused


async def test_digests(served: Served) -> None:
    assert (await events(served, [spec("a", sha256=SHA256.upper()), chunk(0)]))[-1].context.media_sha256 == SHA256
    for request_id in ("", "b"):
        with pytest.raises(InvalidArgument) as caught:
            await events(served, [spec(request_id, sha256="0" * 64), chunk(0)])
        assert caught.value.reason == "DIGEST_MISMATCH"


async def watch(served: Served, **target: str) -> list[verifier_pb2.WatchPrefillResponse]:
    try:
        call = served.stub.WatchPrefill(verifier_pb2.WatchPrefillRequest(**target))
        return [response async for response in call]
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


async def test_a_creation_is_watched_to_its_end(served: Served) -> None:
    call = served.stub.Prefill()
    await call.write(spec())
    await call.read()
    with pytest.raises(FailedPrecondition) as caught:
        await events(served, [spec(), chunk(0)])
    assert caught.value.reason == "REQUEST_RUNNING"
    watching = asyncio.create_task(watch(served, request_id="r1"))
    await asyncio.sleep(0.05)
    served.verifier.device.submit(time.sleep, 0.3)
    await call.write(chunk(0))
    await call.done_writing()
    responses = await watching
    stages = [one.progress.stage for one in responses[:-1]]
    assert stages[0] == UPLOAD
    assert contexts_pb2.CONTEXT_STAGE_PREFILL in stages
    made = responses[-1].context
    for target in ({"request_id": "r1"}, {"name": made.name}):
        assert (await watch(served, **target))[-1].context.name == made.name
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_nothing_to_watch(served: Served) -> None:
    wrong: list[tuple[dict[str, str], type[FoveateError]]] = [
        ({}, InvalidArgument),
        ({"name": "x"}, InvalidArgument),
        ({"request_id": "never"}, NotFound),
        ({"name": "contexts/" + "0" * 64}, NotFound),
    ]
    for target, error in wrong:
        with pytest.raises(error):
            await watch(served, **target)
    await break_off(served, spec(), chunk(0, HALF))
    await until(lambda: served.verifier.num_prefills == 0)
    with pytest.raises(NotFound):
        await watch(served, request_id="r1")
    with pytest.raises(NotFound):
        await watch(served, request_id="r1", tenant="them")


def test_what_is_kept_is_bounded_and_goes_with_time() -> None:
    now = 0.0
    creations = Creations(clock=lambda: now)
    spools = []
    for index in range(20):
        creation = creations.begin("", f"r{index}", b"same")
        spools.append(UploadSpool(max_bytes=10))
        now += 1
        creations.ended(creation, spool=spools[-1])
    assert [spool._file.closed for spool in spools] == [True] * 4 + [False] * 16
    now += 601
    creations.ended(creations.begin("", "new", b"same"))
    assert all(spool._file.closed for spool in spools)
    with pytest.raises(NotFound):
        creations.result("", "r19")
