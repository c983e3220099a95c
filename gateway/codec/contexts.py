"""Messages of ContextService and of the verifier's Prefill, which have the same payloads."""

from __future__ import annotations

from google.protobuf import timestamp_pb2

from foveate.rpc.video_proto import timings_from_proto, timings_to_proto, video_from_proto, video_to_proto
from foveate.v1 import contexts_pb2, verifier_pb2
from gateway import facts

UploadRequest = contexts_pb2.CreateContextRequest | verifier_pb2.PrefillRequest
PrefillEvent = facts.ContextProgress | facts.Context


def upload_part(request: UploadRequest) -> facts.ContextSpec | facts.MediaChunk | None:
    """Returns the spec or the chunk of a message; None when it has neither."""
    match request.WhichOneof("payload"):
        case "chunk":
            return facts.MediaChunk(request.chunk.write_offset, request.chunk.data)
        case "spec":
            return _spec(request.spec)
        case _:
            return None


def _spec(spec: contexts_pb2.ContextSpec) -> facts.ContextSpec | None:
    sampling = facts.FrameSampling(
        fps=spec.sampling.fps if spec.sampling.HasField("fps") else None,
        max_frames=spec.sampling.max_frames if spec.sampling.HasField("max_frames") else None,
    )
    match spec.WhichOneof("source"):
        case "path":
            return facts.ContextSpec(path=spec.path, sampling=sampling)
        case "upload":
            upload = spec.upload
            return facts.ContextSpec(None, upload.filename, upload.total_bytes, sampling)
        case _:
            return facts.ContextSpec(path="", sampling=sampling)


def prefill_request(part: facts.ContextSpec | facts.MediaChunk) -> verifier_pb2.PrefillRequest:
    """Encodes a part of an upload for the verifier."""
    if isinstance(part, facts.MediaChunk):
        chunk = contexts_pb2.MediaChunk(write_offset=part.write_offset, data=part.data)
        return verifier_pb2.PrefillRequest(chunk=chunk)
    sampling = contexts_pb2.FrameSampling(fps=part.sampling.fps, max_frames=part.sampling.max_frames)
    if part.path is not None:
        return verifier_pb2.PrefillRequest(spec=contexts_pb2.ContextSpec(path=part.path, sampling=sampling))
    upload = contexts_pb2.Upload(filename=part.filename, total_bytes=part.total_bytes)
    return verifier_pb2.PrefillRequest(spec=contexts_pb2.ContextSpec(upload=upload, sampling=sampling))


def prefill_event(response: verifier_pb2.PrefillResponse) -> PrefillEvent:
    """Decodes a message of the verifier's Prefill."""
    if response.WhichOneof("event") == "context":
        return context(response.context)
    progress = response.progress
    return facts.ContextProgress(int(progress.stage), progress.done, progress.total)


def prefill_event_to_proto(event: PrefillEvent) -> contexts_pb2.CreateContextResponse:
    """Encodes a message of CreateContext."""
    if isinstance(event, facts.Context):
        return contexts_pb2.CreateContextResponse(context=context_to_proto(event))
    stage = contexts_pb2.ContextStage.ValueType(event.stage)
    progress = contexts_pb2.ContextProgress(stage=stage, done=event.done, total=event.total)
    return contexts_pb2.CreateContextResponse(progress=progress)


def context(message: contexts_pb2.Context) -> facts.Context:
    """Decodes a context."""
    return facts.Context(
        name=message.name,
        video=video_from_proto(message.video),
        num_visual_tokens=message.num_visual_tokens,
        num_tokens=message.num_tokens,
        kv_bytes=message.kv_bytes,
        create_time_ns=message.create_time.ToNanoseconds(),
        reused=message.reused,
        timings=timings_from_proto(message.timings),
    )


def context_to_proto(held: facts.Context) -> contexts_pb2.Context:
    """Encodes a context."""
    create_time = timestamp_pb2.Timestamp()
    create_time.FromNanoseconds(held.create_time_ns)
    return contexts_pb2.Context(
        name=held.name,
        video=video_to_proto(held.video),
        num_visual_tokens=held.num_visual_tokens,
        num_tokens=held.num_tokens,
        kv_bytes=held.kv_bytes,
        create_time=create_time,
        reused=held.reused,
        timings=timings_to_proto(held.timings),
    )
