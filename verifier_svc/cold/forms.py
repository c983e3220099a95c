"""What a cold copy is made of: named arrays of bytes, and the facts of the context; to and from its manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.visual_rows import Span
from foveate.context_source import ContextSource
from foveate.rpc.video_proto import timings_from_proto, timings_to_proto, video_from_proto, video_to_proto
from foveate.store.errors import Corrupt
from foveate.v1 import contexts_pb2, kv_pb2, records_pb2
from verifier_svc.cold.chunks import CHUNK_BYTES, CopyName
from verifier_svc.contexts import ContextFacts
from verifier_svc.timeline import FrameSampling

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "int8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_TENSORS = 64


@dataclass(frozen=True)
class Array:
    """A named array in this host's memory, as its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Array:
        """Wraps a contiguous tensor in host memory, without a copy."""
        return cls(name, _NAMES[tensor.dtype], tuple(tensor.shape), bytes_of(tensor))

    @classmethod
    def of_bytes(cls, name: str, data: bytes | memoryview) -> Array:
        """Wraps bytes that are no tensor, such as a file."""
        return cls(name, "uint8", (len(data),), memoryview(data))


@dataclass(frozen=True)
class Copy:
    """A cold copy as its manifest describes it; checked against the identity it was asked for."""

    name: CopyName
    manifest: records_pb2.ColdManifest
    facts: ContextFacts

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(tensor.num_bytes for tensor in self.manifest.tensors)

    @property
    def arrays(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each array by name."""
        return {one.name: (_DTYPES[one.dtype], tuple(map(int, one.shape))) for one in self.manifest.tensors}


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor in host memory, without a copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor in host memory has bytes")
    if tensor.numel() == 0:
        return memoryview(b"")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def manifest_of(
    facts: ContextFacts, name: CopyName, arrays: Sequence[Array], chunks: Sequence[tuple[int, bytes]], write_ms: float
) -> records_pb2.ColdManifest:
    """Returns the manifest of a copy; `chunks` are (length, checksum) in order."""
    return records_pb2.ColdManifest(
        context_id=facts.context_id,
        tenant=facts.tenant,
        form=contexts_pb2.ContextSource.ValueType(name.form),
        generation=name.generation,
        tensors=[
            records_pb2.ColdTensor(name=one.name, dtype=one.dtype, shape=one.shape, num_bytes=len(one.data))
            for one in arrays
        ],
        chunks=[records_pb2.ColdChunk(num_bytes=length, xxh3_128=checksum) for length, checksum in chunks],
        facts=facts_to_proto(facts),
        write_ms=write_ms,
    )


def copy_of(manifest: records_pb2.ColdManifest, *, context_id: str, form: ContextSource) -> Copy:
    """Returns the copy that a manifest describes. Raises Corrupt unless it is the one asked for, and consistent."""
    if (manifest.context_id, int(manifest.form)) != (context_id, int(form)) or manifest.generation < 1:
        raise Corrupt("a manifest belongs to another context or form")
    names = [one.name for one in manifest.tensors]
    if not 0 < len(names) <= _MAX_TENSORS or len(set(names)) != len(names):
        raise Corrupt("a manifest's arrays are not named as they should be")
    for one in manifest.tensors:
        dtype = _DTYPES.get(one.dtype)
        if dtype is None or math.prod(one.shape) * dtype.itemsize != one.num_bytes:
            raise Corrupt(f"a manifest's array {one.name!r} does not add up")
    sizes = [one.num_bytes for one in manifest.tensors]
    if [chunk.num_bytes for chunk in manifest.chunks] != [length for _, _, length in split_all(sizes)]:
        raise Corrupt("a manifest's chunks do not add up")
    if any(len(chunk.xxh3_128) != 16 for chunk in manifest.chunks):
        raise Corrupt("a manifest's checksums are cut")
    facts = facts_from_proto(manifest.facts, tenant=manifest.tenant)
    if facts.context_id != context_id:
        raise Corrupt("a manifest's facts belong to another context")
    return Copy(CopyName(context_id, form, manifest.generation), manifest, facts)


def split_all(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns (array, offset, length) of every chunk; none crosses from one array into the next."""
    return [
        (place, start, min(CHUNK_BYTES, size - start))
        for place, size in enumerate(sizes)
        for start in range(0, size, CHUNK_BYTES)
    ]


def facts_to_proto(facts: ContextFacts) -> records_pb2.ColdFacts:
    """Returns everything of a context that is not in its arrays."""
    context = contexts_pb2.Context(
        name=facts.name,
        video=video_to_proto(facts.video),
        num_visual_tokens=facts.num_visual_tokens,
        num_tokens=facts.num_tokens,
        kv_bytes=facts.kv_bytes,
        timings=timings_to_proto(facts.timings),
        media_sha256=facts.media_sha256,
    )
    context.create_time.FromNanoseconds(facts.create_time_ns)
    return records_pb2.ColdFacts(
        context=context,
        visual_spans=[kv_pb2.VisualSpan(start=start, num_tokens=number) for start, number in facts.visual_spans],
        position_delta=facts.position_delta,
        grid=facts.grid,
        fps=facts.sampling.fps,
        max_frames=facts.sampling.max_frames,
        stored_fps=facts.sampling.stored_fps,
        media_sha256=facts.media_sha256,
        media_bytes=facts.media_bytes,
        second_per_grid=facts.second_per_grid,
    )


def facts_from_proto(message: records_pb2.ColdFacts, *, tenant: str) -> ContextFacts:
    """Returns the facts. Raises Corrupt when they cannot be a context's."""
    context = message.context
    spans = tuple((span.start, span.num_tokens) for span in message.visual_spans)
    if len(message.grid) != 3 or not _are_spans(spans, context):
        raise Corrupt("a record's facts do not add up")
    num_temporal, num_rows, num_columns = message.grid
    stored_fps = message.stored_fps if message.HasField("stored_fps") else None
    return ContextFacts(
        context_id=context.name.removeprefix("contexts/"),
        num_tokens=context.num_tokens,
        visual_spans=spans,
        position_delta=message.position_delta,
        video=video_from_proto(context.video),
        timings=timings_from_proto(context.timings),
        kv_bytes=context.kv_bytes,
        create_time_ns=context.create_time.ToNanoseconds(),
        tenant=tenant,
        media_sha256=message.media_sha256,
        media_bytes=message.media_bytes,
        grid=(num_temporal, num_rows, num_columns),
        second_per_grid=message.second_per_grid,
        sampling=FrameSampling(message.fps, message.max_frames, stored_fps),
    )


def _are_spans(spans: Sequence[Span], context: contexts_pb2.Context) -> bool:
    """Whether spans are ascending runs inside the context that hold its visual tokens."""
    ends = [0, *(start + number for start, number in spans)]
    is_ordered = all(start >= end and number > 0 for (start, number), end in zip(spans, ends[:-1], strict=True))
    num_visual = sum(number for _, number in spans)
    return is_ordered and ends[-1] <= context.num_tokens and 0 < num_visual == context.num_visual_tokens
