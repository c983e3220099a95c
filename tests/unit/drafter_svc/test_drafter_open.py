"""Opening a sequence: what is refused and why, and what happens when the verifier's pool goes away."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from drafter_svc.drafter import Drafter
from engine.handle_proto import handle_to_proto
from engine.kv_handle import PoolHandle, ShmSegment
from engine.kv_pool import KvPool
from engine.loading import LoadedModel
from foveate.rpc.errors import FailedPrecondition, InvalidArgument
from foveate.v1 import drafter_pb2, kv_pb2, sampling_pb2
from tests.fakes import until
from tests.unit.drafter_svc.sequence import Sequence, make_sequence
from tests.unit.drafter_svc.stream import Stream, drafting, refused

if TYPE_CHECKING:
    from foveate.v1.drafter_pb2_grpc import DrafterServiceAsyncStub as Stub


def with_handle(sequence: Sequence, **changes: Any) -> drafter_pb2.OpenDraft:
    message = sequence.open_message()
    message.kv_handle.CopyFrom(handle_to_proto(dataclasses.replace(sequence.pool.handle, **changes)))
    return message


def elsewhere(handle: PoolHandle) -> ShmSegment:
    assert isinstance(handle.segment, ShmSegment)
    return ShmSegment(handle.segment.path, "another-host-3")


async def test_info_names_model_and_namespace(stub: Stub, drafter: Drafter, loaded: LoadedModel) -> None:
    info = await stub.GetDrafterInfo(drafter_pb2.GetDrafterInfoRequest())
    assert info.model_fingerprint == loaded.fingerprint
    assert info.tokenizer_sha256 == loaded.tokenizer_sha256
    assert info.shm_namespace_id
    assert info.max_draft_tokens == 16
    assert info.num_sequences == 0


async def test_what_cannot_be_shared_is_refused_with_its_reason(stub: Stub, sequence: Sequence) -> None:
    handle = sequence.pool.handle
    assert isinstance(handle.segment, ShmSegment)
    gone = ShmSegment(f"{handle.segment.path[:-16]}{'0' * 16}", handle.segment.namespace_id)
    for reason, changes in (
        ("MODEL_MISMATCH", {"model_fingerprint": "0" * 32}),
        ("MODEL_MISMATCH", {"layout": dataclasses.replace(handle.layout, num_layers=9)}),
        ("KV_NOT_SHARED", {"segment": elsewhere(handle)}),
        ("KV_NOT_SHARED", {"segment": ShmSegment("/etc/passwd", handle.segment.namespace_id)}),
        ("KV_STALE", {"epoch": handle.epoch + 2}),
        ("KV_STALE", {"segment": gone}),
    ):
        error = await refused(Stream(stub.Draft()), open=with_handle(sequence, **changes))
        assert isinstance(error, FailedPrecondition)
        assert error.reason == reason
    async with drafting(stub, sequence):
        pass  # the next one is served


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("open.sequence_id", {"sequence_id": ""}),
        ("open.max_tokens", {"max_tokens": 0}),
        ("open.num_context_tokens", {"num_context_tokens": 10_000}),
        ("open.num_prompt_tokens", {"num_prompt_tokens": 3}),
        ("open.visual_spans", {"visual_spans": [kv_pb2.VisualSpan(start=80, num_tokens=50)]}),
        ("open.visual_spans", {"visual_spans": [kv_pb2.VisualSpan(start=9, num_tokens=3)] * 2}),
        ("open.sampling.temperature", {"sampling": sampling_pb2.SamplingParams(temperature=-1)}),
        ("open.sampling.seed", {"sampling": sampling_pb2.SamplingParams(temperature=1)}),
        ("open.sampling.top_p", {"sampling": sampling_pb2.SamplingParams(top_p=0)}),
        ("open.selection", {"selection": None}),
        ("open.kv_handle.dtype", {"kv_handle": kv_pb2.KvHandle(dtype="int8")}),
        ("open", {"thread": kv_pb2.KvSlab(offset_bytes=1 << 40, capacity=100)}),
        ("open", {"context": kv_pb2.KvSlab(offset_bytes=4097, capacity=100)}),
    ],
)
async def test_malformed_opens_name_the_field(
    stub: Stub, sequence: Sequence, field: str, change: dict[str, Any]
) -> None:
    message = sequence.open_message()
    for name, value in change.items():
        message.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, int | str):
            setattr(message, name, value)
        elif value is not None:
            getattr(message, name).CopyFrom(value)
    error = await refused(Stream(stub.Draft()), open=message)
    assert isinstance(error, InvalidArgument)
    assert field in [violation.field for violation in error.violations]


async def test_a_selection_outside_the_context_is_not_followed(stub: Stub, sequence: Sequence) -> None:
    sequence.pool.selection_view(sequence.selection)[0, 0, 3] = 10_000
    error = await refused(Stream(stub.Draft()), open=sequence.open_message())
    assert error.reason == "KV_STALE"


async def test_a_pool_that_closes_ends_the_drafting(stub: Stub, sequence: Sequence, loaded: LoadedModel) -> None:
    async with drafting(stub, sequence) as stream:
        await stream.round(1, sequence.num_prompt_tokens, sequence.tokens)
        sequence.pool.close()
        asked = drafter_pb2.DraftRound(
            sequence_id="s1",
            round=2,
            base_len=sequence.num_prompt_tokens + 1,
            token_ids=[9],
            num_draft_tokens=5,
        )
        assert (await refused(stream, round=asked)).reason == "KV_STALE"
    assert (await refused(Stream(stub.Draft()), open=sequence.open_message())).reason == "KV_STALE"


async def test_a_pool_is_mapped_once_and_dropped_when_its_owner_is_gone(
    stub: Stub, loaded: LoadedModel, pool: KvPool, drafter: Drafter
) -> None:
    attachments = drafter._attachments
    sequence = make_sequence(loaded, pool)
    for _ in range(3):
        async with drafting(stub, sequence):
            pass
    assert len(attachments) == 1
    pool.close()
    await until(lambda: len(attachments) == 0)  # also when nobody asks: the next pool may need the memory
    other = KvPool.create(loaded.layout, pool_bytes=4 << 20, device=loaded.device, model_fingerprint=loaded.fingerprint)
    try:
        async with drafting(stub, make_sequence(loaded, other)):
            assert len(attachments) == 1
    finally:
        other.close()
