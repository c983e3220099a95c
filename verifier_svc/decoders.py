"""Decoding behind a process boundary: a file that crashes or bloats its decoder takes nothing else down.

take     a spare process (started ahead, so that nobody waits for its imports) gets the file's descriptor
ask      headers, timeline, frames: every reply is checked, for it may come from a decoder that was taken over
end      the process is killed when the video is closed, late, or wrong; it never serves a second video
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Generator
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from google.rpc import status_pb2
from opentelemetry.metrics import Counter

from foveate.rpc.errors import FoveateError, ResourceExhausted, Unavailable, from_status
from foveate.telemetry import conventions as names
from foveate.telemetry import metrics
from verifier_svc.decoder_wire import END, FAILED, FRAMES, VALUE, WireError, receive
from verifier_svc.limits import MediaLimits
from verifier_svc.media import Media, container_format, not_a_video
from verifier_svc.timeline import FramePlan
from verifier_svc.video import FrameChunk, StreamFacts, Timeline

_START = "import sys; sys.path[:] = sys.argv.pop(1).split(':'); from verifier_svc.decoder_child import main; main()"
_BYTES_PER_TIME = 16
_ENDS_BY_ITSELF = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class _Process:
    """A decoder process that waits for its video."""

    def __init__(self, limits: MediaLimits, num_threads: int) -> None:
        ours, theirs = socket.socketpair()
        cpu_s = math.ceil(limits.max_decode_s * max(1, num_threads)) + 10
        path = ":".join(os.path.abspath(entry) for entry in sys.path)
        command = [sys.executable, "-I", "-c", _START, path, str(limits.max_decoder_bytes), str(cpu_s)]
        with theirs:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={}
            )
        self.connection = ours

    def end(self) -> int:
        """Kills the process; returns its exit status."""
        self.connection.close()
        self.process.kill()
        return self.process.wait()


class Decoders:
    """Makes decoder processes, `num_spares` of them ahead of time. Thread-safe."""

    def __init__(self, limits: MediaLimits, *, num_threads: int = 1, num_spares: int = 1) -> None:
        self._limits = limits
        self._num_threads = num_threads
        self._num_spares = num_spares
        self._lock = threading.Lock()
        self._spares: list[_Process] = []
        self._is_closed = False
        self._failures = metrics.counter(names.METRIC_DECODER_FAILURES, "Decoders that crashed, bloated or hung")
        self._fill()

    def open(self, media: Media) -> IsolatedVideo:
        """Returns the video of a file; INVALID_ARGUMENT when its first bytes are no container of ours."""
        if media.decoder is None:
            media.decoder = IsolatedVideo(self, media, container_format(media), self._limits, self._failures)
        return media.decoder

    def take(self, media: Media, format_name: str) -> _Process:
        """Hands a file to a process."""
        with self._lock:
            process = self._spares.pop() if self._spares else None
        if process is None or process.process.poll() is not None:
            process = _Process(self._limits, self._num_threads)
        self._fill()
        spec = {
            "format": format_name,
            "num_bytes": media.num_bytes,
            "field_path": media.field_path,
            "stored_fps": media.stored_fps,
            "limits": asdict(self._limits),
            "num_threads": self._num_threads,
        }
        # Opened anew: a place of its own in the file, and no way to write.
        descriptor = os.open(f"/proc/self/fd/{media.file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            socket.send_fds(process.connection, [json.dumps(spec).encode()], [descriptor])
        except OSError:
            process.end()
            raise Unavailable("no decoder could be started", reason="DECODER_LOST", retry_after_s=1.0) from None
        finally:
            os.close(descriptor)
        return process

    def close(self) -> None:
        """Ends the spares."""
        with self._lock:
            self._is_closed = True
            spares, self._spares = self._spares, []
        for spare in spares:
            spare.end()

    def _fill(self) -> None:
        with self._lock:
            while not self._is_closed and len(self._spares) < self._num_spares:
                self._spares.append(_Process(self._limits, self._num_threads))


@dataclass
class IsolatedVideo:
    """A video whose decoder is another process; blocking, for worker threads. Its `Media` closes it."""

    decoders: Decoders
    media: Media
    format_name: str
    limits: MediaLimits
    failures: Counter
    _facts: StreamFacts | None = None
    _process: _Process | None = None
    _deadline_s: float = 0.0

    def facts(self) -> StreamFacts:
        """Returns what the headers claim; refuses what is too large by them."""
        if self._facts is None:
            with self._asking():
                _, value, _ = self._ask({"do": "facts"}, max_raw_bytes=0)
                width, height, num_frames, duration_s = _numbers(value, 4)
                if not 0 < width * height <= self.limits.max_frame_pixels:
                    raise WireError("a frame size out of bounds")
                self._facts = StreamFacts(int(width), int(height), int(num_frames), float(duration_s))
        return self._facts

    def timeline(self) -> Timeline:
        """Returns the times of the stored frames."""
        with self._asking():
            most = self.limits.max_stored_frames * _BYTES_PER_TIME
            _, value, raw = self._ask({"do": "timeline"}, max_raw_bytes=most)
            ticks = array("q")
            ticks.frombytes(raw)
            half = len(ticks) // 2
            if not half or min(ticks[half:]) < 1:
                raise WireError("a timeline that is none")
            times = tuple(Fraction(ticks[index], ticks[half + index]) for index in range(half))
            return Timeline(times, Fraction(*map(int, _numbers(value, 2))))

    def read(self, plan: FramePlan, *, frames_per_chunk: int) -> Generator[FrameChunk]:
        """Yields the frames of `plan`, `frames_per_chunk` at a time. Closing it early ends the decoder."""
        facts, num_left = self.facts(), plan.num_frames
        times = None if plan.target_times_s is None else [[t.numerator, t.denominator] for t in plan.target_times_s]
        asked = {"do": "read", "plan": [plan.num_frames, plan.sampled_fps, plan.duration_s, times]}
        most = frames_per_chunk * 3 * self.limits.max_frame_pixels
        with self._asking():
            kind, value, raw = self._ask({**asked, "frames_per_chunk": frames_per_chunk}, max_raw_bytes=most)
            while kind == FRAMES:
                chunk = _chunk(value, raw, most_frames=min(frames_per_chunk, num_left))
                num_left -= len(chunk.timestamps_s)
                yield chunk
                kind, value, raw = self._receive(most)
            if kind != END or num_left == plan.num_frames:
                raise WireError(f"{kind!r} in place of frames of {facts.width}x{facts.height}")

    def close(self) -> None:
        """Ends the decoder, also in the middle of its work; the thread that waits for it is told. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _ask(self, request: dict[str, object], *, max_raw_bytes: int) -> tuple[bytes, Any, bytearray]:
        if self._process is None:
            self._process = self.decoders.take(self.media, self.format_name)
            self._deadline_s = time.monotonic() + self.limits.max_decode_s
        self._process.connection.settimeout(self._remaining_s())
        self._process.connection.sendall(json.dumps(request).encode() + b"\n")
        return self._receive(max_raw_bytes)

    def _receive(self, max_raw_bytes: int) -> tuple[bytes, Any, bytearray]:
        process = self._process
        if process is None:
            raise WireError("the video was closed")
        process.connection.settimeout(self._remaining_s())
        kind, value, raw = receive(process.connection, max_raw_bytes=max(max_raw_bytes, 1 << 16))
        if kind == FAILED:
            raise _named(raw)
        if kind not in (VALUE, FRAMES, END):
            raise WireError(f"a reply of kind {kind!r}")
        return kind, value, raw

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline_s - time.monotonic())

    @contextlib.contextmanager
    def _asking(self) -> Generator[None]:
        try:
            yield
        except FoveateError:
            raise
        except TimeoutError:
            self.close()
            self.failures.add(1, {names.REASON: "slow"})
            limit = f"{self.limits.max_decode_s:g}"
            raise ResourceExhausted(
                f"decoding the video takes longer than {limit} s",
                reason="DECODE_TOO_LONG",
                metadata={"limit": limit},
            ) from None
        except (WireError, OSError, ValueError) as error:
            raise self._lost(error) from error
        except GeneratorExit:
            self.close()
            raise

    def _lost(self, error: Exception) -> FoveateError:
        """Returns what a decoder's end means: killed by somebody else, try again; by its own file's doing, do not."""
        process, self._process = self._process, None
        if process is None:
            return Unavailable("the video was closed", reason="DECODER_LOST", retry_after_s=1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(0.5)
        was_running = process.process.poll() is None
        status = process.end()
        number = -status if status < 0 and not was_running else 0
        self.failures.add(1, {names.REASON: signal.Signals(number).name if number else "protocol"})
        if number in _ENDS_BY_ITSELF:
            return Unavailable("the video's decoder was killed", reason="DECODER_LOST", retry_after_s=1.0)
        return not_a_video(self.media, "is damaged: its decoder failed")


def _named(raw: bytearray) -> FoveateError:
    try:
        return from_status(status_pb2.Status.FromString(bytes(raw)))
    except Exception as error:
        raise WireError("an error that is none") from error


def _numbers(value: Any, count: int) -> list[float]:
    if not isinstance(value, list) or len(value) != count or not all(type(one) in (int, float) for one in value):
        raise WireError("a reply without its numbers")
    if not all(math.isfinite(one) for one in value):
        raise WireError("a number that is none")
    return value


def _chunk(value: Any, raw: bytearray, *, most_frames: int) -> FrameChunk:
    if not isinstance(value, dict):
        raise WireError("frames without a shape")
    shape = [int(one) for one in _numbers(value.get("shape"), 4)]
    times = value.get("timestamps_s")
    if not 0 < shape[0] <= most_frames or shape[3] != 3 or math.prod(shape) != len(raw) or min(shape) < 1:
        raise WireError("frames of another shape than was asked for")
    return FrameChunk(np.frombuffer(raw, np.uint8).reshape(shape), tuple(_numbers(times, shape[0])))
