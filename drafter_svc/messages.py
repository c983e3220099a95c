"""Messages of DrafterService <-> the drafter's values, with every field of a request checked."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_svc.drafter import Drafter, Opened
from drafter_svc.drafts import Draft, Round, SequenceSpec
from engine.handle_proto import handle_from_proto, selection_from_proto, slab_from_proto
from engine.sampling_proto import sampling_from_proto, sampling_violations
from engine.shm import shm_namespace_id
from foveate import __version__
from foveate.rpc.errors import FieldViolation, InvalidArgument, invalid
from foveate.v1 import drafter_pb2, kv_pb2


def parse_open(message: drafter_pb2.OpenDraft) -> SequenceSpec:
    """Reads `open`; INVALID_ARGUMENT names every wrong field."""
    violations = [*_missing(message), *_length_violations(message), *_span_violations(message)]
    violations += sampling_violations(message.sampling, "open.sampling")
    if violations:
        raise InvalidArgument("the sequence cannot be opened", violations=violations)
    try:
        handle = handle_from_proto(message.kv_handle)
    except ValueError as error:
        field, _, description = str(error).partition(": ")
        raise invalid(f"open.kv_handle.{field}", description) from error
    return SequenceSpec(
        sequence_id=message.sequence_id,
        handle=handle,
        context=slab_from_proto(message.context),
        thread=slab_from_proto(message.thread),
        selection=selection_from_proto(message.selection),
        num_context_tokens=message.num_context_tokens,
        num_prompt_tokens=message.num_prompt_tokens,
        visual_spans=tuple((span.start, span.num_tokens) for span in message.visual_spans),
        position_delta=message.position_delta,
        sampling=sampling_from_proto(message.sampling),
        max_tokens=message.max_tokens,
    )


def parse_round(message: drafter_pb2.DraftRound) -> Round:
    """Reads a round; whether it may run is the sequence's to say."""
    return Round(
        sequence_id=message.sequence_id,
        round=message.round,
        base_len=message.base_len,
        token_ids=tuple(message.token_ids),
        num_draft_tokens=message.num_draft_tokens,
    )


def opened_message(request_id: int, opened: Opened) -> drafter_pb2.DraftResponse:
    """Returns the reply to `open`."""
    payload = drafter_pb2.DraftOpened(num_sparse_tokens=opened.num_sparse_tokens, gather_us=opened.gather_us)
    return drafter_pb2.DraftResponse(request_id=request_id, opened=payload)


def drafted_message(request_id: int, draft: Draft) -> drafter_pb2.DraftResponse:
    """Returns the reply to a round."""
    payload = drafter_pb2.RoundDrafted(
        round=draft.round,
        base_len=draft.base_len,
        draft_token_ids=draft.draft_token_ids,
        model_us=draft.model_us,
    )
    return drafter_pb2.DraftResponse(request_id=request_id, drafted=payload)


def info_message(drafter: Drafter) -> drafter_pb2.GetDrafterInfoResponse:
    """Returns what the drafter runs."""
    return drafter_pb2.GetDrafterInfoResponse(
        version=__version__,
        model=drafter.loaded.name,
        model_fingerprint=drafter.loaded.fingerprint,
        tokenizer_sha256=drafter.loaded.tokenizer_sha256,
        device=drafter.loaded.device.type,
        shm_namespace_id=shm_namespace_id(),
        max_draft_tokens=drafter.config.max_draft_tokens,
        num_sequences=drafter.num_sequences,
    )


def _missing(message: drafter_pb2.OpenDraft) -> list[FieldViolation]:
    present = {
        "sequence_id": bool(message.sequence_id),
        "kv_handle": message.HasField("kv_handle"),
        "context": message.HasField("context"),
        "thread": message.HasField("thread"),
        "selection": message.HasField("selection"),
        "num_context_tokens": message.num_context_tokens > 0,
        "max_tokens": message.max_tokens > 0,
    }
    return [FieldViolation(f"open.{field}", "must be set") for field, is_set in present.items() if not is_set]


def _length_violations(message: drafter_pb2.OpenDraft) -> list[FieldViolation]:
    violations = []
    if message.num_context_tokens > message.context.capacity:
        violations.append(FieldViolation("open.num_context_tokens", "must fit the context slab"))
    in_thread = message.num_prompt_tokens - message.num_context_tokens
    if not 0 <= in_thread <= message.thread.capacity:
        violations.append(FieldViolation("open.num_prompt_tokens", "must lie in the thread slab"))
    return violations


def _span_violations(message: drafter_pb2.OpenDraft) -> list[FieldViolation]:
    spans: Sequence[kv_pb2.VisualSpan] = message.visual_spans
    ends = [0, *(span.start + span.num_tokens for span in spans)]
    is_ordered = all(span.start >= end for span, end in zip(spans, ends[:-1], strict=True))
    if not is_ordered or ends[-1] > message.num_context_tokens:
        return [FieldViolation("open.visual_spans", "must be ascending runs inside the context")]
    return []
