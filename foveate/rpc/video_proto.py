"""VideoFacts and ContextTimings to messages and back."""

from __future__ import annotations

from foveate.v1 import contexts_pb2
from foveate.video import ContextTimings, VideoFacts


def video_from_proto(message: contexts_pb2.VideoFacts) -> VideoFacts:
    """Returns the facts of a message."""
    return VideoFacts(
        duration_s=message.duration_s,
        num_frames=message.num_frames,
        sampled_fps=message.sampled_fps,
        frame_timestamps_s=tuple(message.frame_timestamps_s),
        width=message.width,
        height=message.height,
    )


def video_to_proto(video: VideoFacts) -> contexts_pb2.VideoFacts:
    """Returns the message of a video's facts."""
    return contexts_pb2.VideoFacts(
        duration_s=video.duration_s,
        num_frames=video.num_frames,
        sampled_fps=video.sampled_fps,
        frame_timestamps_s=video.frame_timestamps_s,
        width=video.width,
        height=video.height,
    )


def timings_from_proto(message: contexts_pb2.ContextTimings) -> ContextTimings:
    """Returns the times of a message."""
    return ContextTimings(message.decode_ms, message.encode_ms, message.prefill_ms)


def timings_to_proto(timings: ContextTimings) -> contexts_pb2.ContextTimings:
    """Returns the message of a context's times."""
    return contexts_pb2.ContextTimings(
        decode_ms=timings.decode_ms, encode_ms=timings.encode_ms, prefill_ms=timings.prefill_ms
    )
