"""Frames without a container: lists of JPEGs, still images, files inside the request. Cases V4, V8 and V9."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from foveate.rpc.errors import FoveateError, InvalidArgument, ResourceExhausted
from foveate.v1 import contexts_pb2, verifier_pb2
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.cold_bench import bits
from tests.unit.verifier_svc.serving import Served, config_for, serving

SIZE = (64, 48)


def jpegs(num_frames: int) -> bytes:
    file = io.BytesIO()
    for index in range(num_frames):
        Image.fromarray(clips.frame_pixels(index, SIZE)).save(file, "JPEG", quality=95)
    return file.getvalue()


def mp4_of_jpegs(num_frames: int, fps: int) -> bytes:
    """The same JPEGs, bit for bit, in a container that says when each is shown."""
    file = io.BytesIO()
    listed = io.BytesIO(jpegs(num_frames))
    with (
        av.open(listed, format="mjpeg", options={"framerate": str(fps)}) as source,
        av.open(file, "w", format="mov") as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    return file.getvalue()


def data_url(data: bytes, label: str) -> list[verifier_pb2.PrefillRequest]:
    url = f"data:{label};base64,{base64.b64encode(data).decode()}"
    spec = contexts_pb2.ContextSpec(url=url, sampling=contexts_pb2.FrameSampling(fps=4))
    return [verifier_pb2.PrefillRequest(spec=spec)]


@pytest.fixture(scope="module")
def folder(checkpoint: Path) -> Path:
    return checkpoint


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    async with serving(config_for(folder)) as one:
        yield one


async def refused(served: Served, requests: list[verifier_pb2.PrefillRequest]) -> FoveateError:
    with pytest.raises(FoveateError) as caught:
        await served.prefill_events(requests)
    return caught.value


async def test_the_same_frames_however_they_come(served: Served) -> None:
    listed = await served.prefill(jpegs(4), fps=4, stored_fps=4)
    stored = await served.prefill(mp4_of_jpegs(4, fps=4), fps=4)
    inside = (await served.prefill_events(data_url(mp4_of_jpegs(4, fps=4), "video/quicktime")))[-1].context
    assert inside.name == stored.name  # the same bytes
    assert (inside.reused, stored.reused) == (True, False)
    assert listed.name != stored.name
    assert list(listed.video.frame_timestamps_s) == [0, 0.25, 0.5, 0.75]
    assert listed.video == stored.video
    assert np.array_equal(await bits(served, listed.name), await bits(served, stored.name))
    plain = await served.prefill_events(data_url(clips.clip(4, fps=4), "video/mp4"))
    assert plain[-1].context.num_visual_tokens == listed.num_visual_tokens == 2 * 12


async def test_the_rate_of_frames_is_in_their_positions(served: Served) -> None:
    deltas = {}
    for rate in (1, 4, 8):
        context = await served.prefill(jpegs(8), fps=rate, stored_fps=rate)
        assert context.video.num_frames == 8
        async with served.answering(context.name) as stream:
            deltas[rate] = stream.opened.position_delta + context.num_visual_tokens
    # Four steps of 2, 0.5 and 0.25 s at two positions a second; a frame is four tokens wide.
    assert deltas == {1: 13, 4: 4, 8: 4}
    # Above two frames per second steps still move on: two of them to a position.
    family = served.verifier.parts.loaded.family
    assert family.video_time_ids(4, 2 / 8) == (0, 0, 1, 1)
    assert family.video_time_ids(4, 2 / 4) == (0, 1, 2, 3)


async def test_a_still_image_is_one_frame_and_needs_no_rate(served: Served) -> None:
    context = await served.prefill(jpegs(1))
    assert (context.video.num_frames, context.num_visual_tokens) == (1, 12)
    inside = (await served.prefill_events(data_url(jpegs(1), "image/jpeg")))[-1].context
    assert inside.num_visual_tokens == 12
    async with served.answering(context.name, "What is it?") as stream:
        assert len(await stream.plain(6)) == 6


@pytest.mark.parametrize(
    ("data", "sampling"),
    [
        (jpegs(2), {"fps": 4}),  # no rate at all: never a silent 24
        (clips.clip(4, fps=4), {"fps": 4, "stored_fps": 4}),  # two rates for one video
        (jpegs(2), {"stored_fps": 0}),
        (jpegs(2), {"stored_fps": float("nan")}),
        (jpegs(2), {"stored_fps": 1e9}),
    ],
)
async def test_one_rate_for_one_video(served: Served, data: bytes, sampling: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await served.prefill(data, **sampling)
    assert [violation.field for violation in caught.value.violations] == ["spec.sampling.stored_fps"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "data:video/webm;base64," + base64.b64encode(clips.clip(2)).decode(),
            "labelled video/webm, but its bytes are mp4",
        ),
        (
            "data:image/jpeg;base64," + base64.b64encode(clips.clip(2)).decode(),
            "labelled image/jpeg, but its bytes are mp4",
        ),
        ("data:text/html;base64,AAAA", "labelled 'text/html'; known are"),
        ("data:;base64,AAAA", "labelled 'nothing'"),
        ("data:video/mp4,AAAA", "must be data:TYPE;base64,DATA"),
        ("data:video/mp4;base64", "must be data:TYPE;base64,DATA"),
        ("data:video/mp4;base64,A A=", "is not base64"),
        ("data:video/mp4;base64,", "is empty"),
    ],
)
async def test_data_urls_that_are_none(served: Served, url: str, message: str) -> None:
    spec = contexts_pb2.ContextSpec(url=url)
    error = await refused(served, [verifier_pb2.PrefillRequest(spec=spec)])
    assert isinstance(error, InvalidArgument)
    assert message in str(error)


async def test_a_data_url_is_no_way_around_the_limit_on_uploads(checkpoint: Path) -> None:
    async with serving(config_for(checkpoint, media={"max_upload_bytes": 1000})) as served:
        error = await refused(served, data_url(bytes(2000), "video/mp4"))
        assert isinstance(error, ResourceExhausted)
        assert error.metadata == {"needed_bytes": "2000", "limit_bytes": "1000"}
