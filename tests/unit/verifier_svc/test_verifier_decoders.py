"""Decoding in a process of its own: equal to decoding here, and whatever a file does to it stays there."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from foveate.rpc.errors import FoveateError, InvalidArgument, ResourceExhausted, Unavailable
from tests.unit.verifier_svc.clips import BIKES, clip
from verifier_svc.config import MIB, MediaLimits
from verifier_svc.decoder_wire import END, FRAMES, VALUE, WireError, receive, send
from verifier_svc.decoders import Decoders, IsolatedVideo
from verifier_svc.media import Media
from verifier_svc.timeline import FramePlan, FrameSampling
from verifier_svc.video import VideoFile

LIMITS = MediaLimits()
ALL = FrameSampling(fps=60, max_frames=1000)


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    made = Decoders(LIMITS)
    yield made
    made.close()


_OPENED: list[Media] = []


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def media_of(data: bytes) -> Media:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - Media closes it
    file.write(data)
    file.flush()
    media = Media(file, len(data), "", "spec.upload")
    _OPENED.append(media)
    return media


def pid_of(video: IsolatedVideo) -> int:
    assert video._process is not None
    return video._process.process.pid


@pytest.mark.parametrize("data", [clip(9), clip(5, container="webm", codec="libvpx-vp9"), BIKES.read_bytes()])
def test_it_gives_what_decoding_here_gives(decoders: Decoders, data: bytes) -> None:
    media = media_of(data)
    here, there = VideoFile.of(media, LIMITS), decoders.open(media)
    assert there.facts() == here.facts()
    assert there.timeline() == here.timeline()
    plan = here.timeline().plan(FrameSampling(fps=2, max_frames=16))
    expected, got = list(here.read(plan, frames_per_chunk=4)), list(there.read(plan, frames_per_chunk=4))
    assert [one.timestamps_s for one in got] == [one.timestamps_s for one in expected]
    assert all(np.array_equal(one.frames, other.frames) for one, other in zip(got, expected, strict=True))
    pid = pid_of(there)
    media.close()
    assert not psutil.pid_exists(pid)


def test_errors_keep_their_reasons(decoders: Decoders) -> None:
    media = media_of(clip(3)[:600])
    with pytest.raises(InvalidArgument) as caught:
        decoders.open(media).facts()
    assert caught.value.reason == "UNREADABLE_VIDEO"
    assert caught.value.violations[0].field == "spec.upload"
    media.close()
    with pytest.raises(InvalidArgument):
        decoders.open(media_of(b"%PDF-1.4 not a video at all"))


def test_a_decoder_has_bounded_memory_and_says_so() -> None:
    limits = replace(LIMITS, max_decoder_bytes=600 * MIB)
    decoders = Decoders(limits, num_spares=0)
    try:
        media = media_of(clip(2, size=(7680, 4320)))
        video = decoders.open(media)
        plan = FramePlan(2, 4.0, 0.5, None)
        with pytest.raises(ResourceExhausted) as caught:
            list(video.read(plan, frames_per_chunk=16))
        assert caught.value.reason == "DECODER_MEMORY"
        media.close()
        small = media_of(clip(4))
        assert decoders.open(small).facts().width == 64
        small.close()
    finally:
        decoders.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGSEGV, InvalidArgument), (signal.SIGABRT, InvalidArgument), (signal.SIGKILL, Unavailable)],
)
def test_a_decoder_that_dies_is_an_error_of_its_video_only(
    decoders: Decoders, number: signal.Signals, kind: type[FoveateError]
) -> None:
    media = media_of(BIKES.read_bytes())
    video = decoders.open(media)
    chunks = video.read(video.timeline().plan(ALL), frames_per_chunk=8)
    next(chunks)
    os.kill(pid_of(video), number)
    with pytest.raises(kind):
        list(chunks)
    media.close()
    again = media_of(BIKES.read_bytes())
    assert decoders.open(again).facts().width == 640
    again.close()


def test_a_decoder_that_hangs_is_ended_in_time() -> None:
    decoders = Decoders(replace(LIMITS, max_decode_s=5.0), num_spares=1)
    media = media_of(BIKES.read_bytes())
    video = decoders.open(media)
    video.facts()
    pid = pid_of(video)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ResourceExhausted) as caught:
        video.timeline()
    assert caught.value.reason == "DECODE_TOO_LONG"
    assert not psutil.pid_exists(pid)
    media.close()
    decoders.close()


def test_closing_ends_a_decoder_at_work_and_tells_who_waits(decoders: Decoders) -> None:
    media = media_of(BIKES.read_bytes())
    video = decoders.open(media)
    chunks = video.read(video.timeline().plan(ALL), frames_per_chunk=8)
    next(chunks)
    pid = pid_of(video)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.2, media.close).start()
    with pytest.raises(Unavailable):
        list(chunks)
    deadline_s = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not psutil.pid_exists(pid)


def test_leaving_the_frames_early_ends_the_decoder(decoders: Decoders) -> None:
    media = media_of(BIKES.read_bytes())
    video = decoders.open(media)
    chunks = video.read(video.timeline().plan(ALL), frames_per_chunk=8)
    next(chunks)
    pid = pid_of(video)
    chunks.close()
    assert not psutil.pid_exists(pid)
    media.close()


def test_a_decoder_holds_nothing_but_its_video(decoders: Decoders, tmp_path: Path) -> None:
    media = media_of(clip(4))
    video = decoders.open(media)
    video.facts()
    child = psutil.Process(pid_of(video))
    assert child.environ() == {}
    assert child.net_connections("inet") == []
    links = {os.readlink(link) for link in Path(f"/proc/{child.pid}/fd").iterdir()}
    assert {link for link in links if link.startswith("/") and link != "/dev/null"} <= {
        os.readlink(f"/proc/self/fd/{media.file.fileno()}")
    }
    assert child.rlimit(psutil.RLIMIT_AS)[0] == LIMITS.max_decoder_bytes
    assert child.rlimit(psutil.RLIMIT_FSIZE)[0] == 0
    assert "NoNewPrivs:\t1" in Path(f"/proc/{child.pid}/status").read_text()
    media.close()


class Liar:
    """A decoder that was taken over: says what it likes."""

    def __init__(self, kind: bytes, value: object, raw: bytes = b"") -> None:
        self.connection, theirs = socket.socketpair()
        send(theirs, kind, value, raw)
        self.theirs = theirs
        self.process = self

    pid = 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def poll(self) -> int:
        return 0

    def end(self) -> int:
        self.connection.close()
        self.theirs.close()
        return 0


@pytest.mark.parametrize(
    ("kind", "value", "raw"),
    [
        (VALUE, [1e9, 1e9, 1, 1], b""),
        (VALUE, [64, 48, 1, float("inf")], b""),
        (VALUE, ["64", 48, 1, 1], b""),
        (VALUE, {"width": 64}, b""),
        (b"?", None, b""),
        (b"X", None, b"no status"),
    ],
)
def test_facts_that_cannot_be_true_are_refused(kind: bytes, value: object, raw: bytes) -> None:
    decoders = Decoders(LIMITS, num_spares=0)
    video = decoders.open(media_of(clip(2)))
    video._process = Liar(kind, value, raw)  # type: ignore[assignment]
    video._deadline_s = time.monotonic() + 5
    with pytest.raises(InvalidArgument, match="its decoder failed"):
        video.facts()


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        ({"shape": [1, 48, 64, 3], "timestamps_s": [0.0]}, b"short"),
        ({"shape": [9, 1, 1, 3], "timestamps_s": [0.0] * 9}, b"x" * 27),
        ({"shape": [1, 1, 1, 3], "timestamps_s": []}, b"xxx"),
        ({"shape": [1, -1, -1, 3], "timestamps_s": [0.0]}, b"xxx"),
        ([], b""),
    ],
)
def test_frames_that_were_not_asked_for_are_refused(value: object, raw: bytes) -> None:
    decoders = Decoders(LIMITS, num_spares=0)
    media = media_of(clip(2))
    video = decoders.open(media)
    video._facts = VideoFile.of(media, LIMITS).facts()
    video._process = Liar(FRAMES, value, raw)  # type: ignore[assignment]
    video._deadline_s = time.monotonic() + 5
    with pytest.raises(InvalidArgument, match="its decoder failed"):
        list(video.read(FramePlan(2, 4.0, 0.5, None), frames_per_chunk=2))


def test_a_reply_larger_than_asked_for_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(theirs, END, None, b"x" * 100)
        with pytest.raises(WireError):
            receive(ours, max_raw_bytes=99)
