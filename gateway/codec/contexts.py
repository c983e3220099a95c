"""Messages of ContextService and of the verifier's Prefill, which have the same payloads."""

from __future__ import annotations

from google.protobuf import timestamp_pb2

from foveate.context_source import ContextSource
from foveate.rpc.errors import invalid
from foveate.rpc.fetch_proto import fetch_from_proto, fetch_to_proto
from foveate.rpc.video_proto import timings_from_proto, timings_to_proto, video_from_proto, video_to_proto
from foveate.v1 import contexts_pb2, verifier_pb2
from gateway import facts

UploadRequest = contexts_pb2.CreateContextRequest | verifier_pb2.PrefillRequest
PrefillEvent = facts.ContextProgress | facts.HeldContext
_SOURCES = {int(source) for source in ContextSource}


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
        stored_fps=spec.sampling.stored_fps if spec.sampling.HasField("stored_fps") else None,
    )
    match spec.WhichOneof("source"):
        case "path":
            return facts.ContextSpec(path=spec.path, sampling=sampling, request_id=spec.request_id)
        case "url":
            return facts.ContextSpec(path=None, sampling=sampling, request_id=spec.request_id, url=spec.url)
        case "upload":
            upload = spec.upload
            return facts.ContextSpec(
                path=None,
                filename=upload.filename,
                total_bytes=upload.total_bytes,
                sampling=sampling,
                request_id=spec.request_id,
                sha256=upload.sha256,
            )
        case _:
            return facts.ContextSpec(path="", sampling=sampling)


def prefill_request(
    part: facts.ContextSpec | facts.MediaChunk, *, tenant: str, usable_pool_ids: frozenset[str]
) -> verifier_pb2.PrefillRequest:
    """Encodes a part of an upload for the verifier; the spec says for whom, and which other pools will do."""
    if isinstance(part, facts.MediaChunk):
        chunk = contexts_pb2.MediaChunk(write_offset=part.write_offset, data=part.data)
        return verifier_pb2.PrefillRequest(chunk=chunk)
    asked = part.sampling
    sampling = contexts_pb2.FrameSampling(fps=asked.fps, max_frames=asked.max_frames, stored_fps=asked.stored_fps)
    if part.path is not None:
        spec = contexts_pb2.ContextSpec(path=part.path, sampling=sampling, request_id=part.request_id)
    elif part.url:
        spec = contexts_pb2.ContextSpec(url=part.url, sampling=sampling, request_id=part.request_id)
    else:
        upload = contexts_pb2.Upload(filename=part.filename, total_bytes=part.total_bytes, sha256=part.sha256)
        spec = contexts_pb2.ContextSpec(upload=upload, sampling=sampling, request_id=part.request_id)
    return verifier_pb2.PrefillRequest(spec=spec, tenant=tenant, usable_pool_ids=sorted(usable_pool_ids))


def context_filter(request: contexts_pb2.ListContextsRequest) -> facts.ContextFilter:
    """Returns which contexts to list. Raises InvalidArgument for a state that does not exist."""
    if request.state not in (contexts_pb2.CONTEXT_STATE_UNSPECIFIED, *facts.ContextState):
        raise invalid("state", "is not a known state")
    state = facts.ContextState(request.state) if request.state else None
    return facts.ContextFilter(state, request.media_sha256 or None)


def prefill_event(response: verifier_pb2.PrefillResponse) -> PrefillEvent:
    """Decodes a message of the verifier's Prefill."""
    if response.WhichOneof("event") == "context":
        return facts.HeldContext(context(response.context), response.holder_pool_id)
    progress = response.progress
    return facts.ContextProgress(int(progress.stage), progress.done, progress.total)


def watch_event(response: verifier_pb2.WatchPrefillResponse) -> facts.ContextProgress | facts.Context:
    """Decodes a message of the verifier's WatchPrefill."""
    if response.WhichOneof("event") == "context":
        return context(response.context)
    progress = response.progress
    return facts.ContextProgress(int(progress.stage), progress.done, progress.total)


def watch_event_to_proto(event: facts.ContextProgress | facts.Context) -> contexts_pb2.WatchContextResponse:
    """Encodes a message of WatchContext."""
    if isinstance(event, facts.Context):
        return contexts_pb2.WatchContextResponse(context=context_to_proto(event))
    stage = contexts_pb2.ContextStage.ValueType(event.stage)
    progress = contexts_pb2.ContextProgress(stage=stage, done=event.done, total=event.total)
    return contexts_pb2.WatchContextResponse(progress=progress)


def prefill_event_to_proto(event: PrefillEvent) -> contexts_pb2.CreateContextResponse:
    """Encodes a message of CreateContext."""
    if isinstance(event, facts.HeldContext):
        return contexts_pb2.CreateContextResponse(context=context_to_proto(event.context))
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
        state=facts.ContextState.COLD if message.state == contexts_pb2.CONTEXT_STATE_COLD else facts.ContextState.READY,
        expire_time_ns=message.expire_time.ToNanoseconds() if message.HasField("expire_time") else None,
        tiers={ContextSource(use.tier): use.num_bytes for use in message.tiers if use.tier in _SOURCES},
        num_hits=message.num_hits,
        pinned=message.pinned,
        fetch=fetch_from_proto(message.fetch),
        media_sha256=message.media_sha256,
        lossy=message.lossy,
    )


def context_to_proto(held: facts.Context) -> contexts_pb2.Context:
    """Encodes a context."""
    create_time = timestamp_pb2.Timestamp()
    create_time.FromNanoseconds(held.create_time_ns)
    expire_time = None
    if held.expire_time_ns is not None:
        expire_time = timestamp_pb2.Timestamp()
        expire_time.FromNanoseconds(held.expire_time_ns)
    return contexts_pb2.Context(
        name=held.name,
        video=video_to_proto(held.video),
        num_visual_tokens=held.num_visual_tokens,
        num_tokens=held.num_tokens,
        kv_bytes=held.kv_bytes,
        create_time=create_time,
        reused=held.reused,
        timings=timings_to_proto(held.timings),
        state=contexts_pb2.ContextState.ValueType(held.state),
        expire_time=expire_time,
        tiers=[
            contexts_pb2.TierUse(tier=contexts_pb2.ContextSource.ValueType(tier), num_bytes=num_bytes)
            for tier, num_bytes in sorted(held.tiers.items())
        ],
        num_hits=held.num_hits,
        pinned=held.pinned,
        fetch=None if held.fetch is None else fetch_to_proto(held.fetch),
        lossy=held.lossy,
        media_sha256=held.media_sha256,
    )
