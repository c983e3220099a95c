"""The process that touches a hostile file: bounded in memory, CPU time and what it may open; one video, then it ends.

It holds one socket (its stdin), the video's descriptor and nothing else: no environment, no network, no file it could
write. It answers requests until the socket closes. libav runs here and nowhere else in the service.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import sys
from array import array
from fractions import Fraction

from foveate.rpc.errors import FoveateError, ResourceExhausted
from verifier_svc.decoder_wire import END, FAILED, FRAMES, VALUE, receive_line, send
from verifier_svc.limits import MediaLimits
from verifier_svc.media import Media
from verifier_svc.timeline import FramePlan
from verifier_svc.video import VideoFile

_PR_SET_NO_NEW_PRIVS = 38
_MAX_FILES = 16


def main() -> None:
    """Serves one video; argv names the limits of memory in bytes and of CPU time in seconds."""
    memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    connection = socket.socket(fileno=os.dup(0))
    _restrict(memory_bytes, cpu_s)
    data, descriptors, _, _ = socket.recv_fds(connection, 65536, 1)
    if not data:
        return  # a spare that was never needed
    spec = json.loads(data)
    file = os.fdopen(descriptors[0], "rb")
    media = Media(file, spec["num_bytes"], "", spec["field_path"], spec["stored_fps"])
    video = VideoFile(media, spec["format"], MediaLimits(**spec["limits"]), spec["num_threads"])
    while line := receive_line(connection):
        try:
            _answer(connection, video, json.loads(line))
        except MemoryError:
            _fail(connection, _out_of_memory(memory_bytes))
        except FoveateError as error:
            is_memory = isinstance(error.__cause__, MemoryError)  # libav's is one too
            _fail(connection, _out_of_memory(memory_bytes) if is_memory else error)


def _answer(connection: socket.socket, video: VideoFile, request: dict[str, object]) -> None:
    match request["do"]:
        case "facts":
            facts = video.facts()
            value = [facts.width, facts.height, facts.claimed_num_frames, facts.claimed_duration_s]
            send(connection, VALUE, value)
        case "timeline":
            timeline = video.timeline()
            ticks = array("q", (time.numerator for time in timeline.timestamps_s))
            ticks.extend(time.denominator for time in timeline.timestamps_s)
            last = timeline.last_frame_s
            send(connection, VALUE, [last.numerator, last.denominator], ticks.tobytes())
        case "read":
            plan = plan_from_json(request["plan"])
            for chunk in video.read(plan, frames_per_chunk=int(str(request["frames_per_chunk"]))):
                head = {"shape": chunk.frames.shape, "timestamps_s": chunk.timestamps_s}
                send(connection, FRAMES, head, chunk.frames.data.cast("B"))
            send(connection, END, None)


def plan_from_json(value: object) -> FramePlan:
    """Reads a plan: [num_frames, sampled_fps, duration_s, [[numerator, denominator], ...] or null]."""
    assert isinstance(value, list)
    num_frames, sampled_fps, duration_s, times = value
    targets = None if times is None else tuple(Fraction(*pair) for pair in times)
    return FramePlan(num_frames, sampled_fps, duration_s, targets)


def _fail(connection: socket.socket, error: FoveateError) -> None:
    send(connection, FAILED, None, error.to_status().SerializeToString())


def _out_of_memory(memory_bytes: int) -> ResourceExhausted:
    return ResourceExhausted(
        f"decoding the video needs more memory than a decoder may have ({memory_bytes} bytes)",
        reason="DECODER_MEMORY",
        metadata={"limit_bytes": str(memory_bytes)},
    )


def _restrict(memory_bytes: int, cpu_s: int) -> None:
    """Gives up everything that decoding does not need."""
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


if __name__ == "__main__":
    main()
