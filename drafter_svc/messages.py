"""Messages of DrafterService <-> the drafter's values, with every field of a request checked."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_svc.drafter import Drafter, Opened
from drafter_svc.drafts import Draft, DraftKind, Round, SequenceSpec, VideoSource
from engine.handle_proto import (
    handle_from_proto,
    layout_to_proto,
    selection_from_proto,
    slab_from_proto,
    tensor_from_proto,
)
from engine.sampling_proto import sampling_from_proto, sampling_violations
from engine.shm import shm_namespace_id
from foveate import __version__
from foveate.rpc.errors import FieldViolation, InvalidArgument, invalid
from foveate.v1 import answers_pb2, drafter_pb2, kv_pb2

_KINDS = {
    answers_pb2.DRAFT_MODE_UNSPECIFIED: DraftKind.SPARSE,
    answers_pb2.DRAFT_MODE_SPARSE: DraftKind.SPARSE,
    answers_pb2.DRAFT_MODE_STREAMING: DraftKind.STREAMING,
    answers_pb2.DRAFT_MODE_LAYERSKIP: DraftKind.LAYERSKIP,
    answers_pb2.DRAFT_MODE_SMALL: DraftKind.SMALL,
}
_MODES = {kind: mode for mode, kind in _KINDS.items()}
_SELECTED = (DraftKind.SPARSE, DraftKind.SMALL)


def parse_open(message: drafter_pb2.OpenDraft, *, vocab_size: int) -> SequenceSpec:
    """Reads `open`; INVALID_ARGUMENT names every wrong field. Token ids must be below `vocab_size`."""
    violations = [*_kind_violations(message), *_missing(message)]
    violations += [*_length_violations(message), *_span_violations(message)]
    violations += sampling_violations(message.sampling, "open.sampling", vocab_size=vocab_size)
    if any(token_id >= vocab_size for token_id in message.penalized_token_ids):
        violations.append(FieldViolation("open.penalized_token_ids", f"ids must be below {vocab_size}"))
    if violations:
        raise InvalidArgument("the sequence cannot be opened", violations=violations)
    try:
        handle = handle_from_proto(message.kv_handle)
    except ValueError as error:
        field, _, description = str(error).partition(": ")
        raise invalid(f"open.kv_handle.{field}", description) from error
    kind = _KINDS[message.mode]
    return SequenceSpec(
        kind=kind,
        sequence_id=message.sequence_id,
        handle=handle,
        context=slab_from_proto(message.context),
        thread=slab_from_proto(message.thread),
        selection=selection_from_proto(message.selection) if kind in _SELECTED else None,
        visual_budget=message.visual_budget,
        video=_video(message) if kind is DraftKind.SMALL else None,
        num_context_tokens=message.num_context_tokens,
        num_prompt_tokens=message.num_prompt_tokens,
        visual_spans=tuple((span.start, span.num_tokens) for span in message.visual_spans),
        position_delta=message.position_delta,
        sampling=sampling_from_proto(message.sampling),
        max_tokens=message.max_tokens,
        penalized_token_ids=tuple(message.penalized_token_ids),
    )


def _video(message: drafter_pb2.OpenDraft) -> VideoSource:
    video = message.video
    try:
        patches = tensor_from_proto(video.patches)
    except ValueError as error:
        field, _, description = str(error).partition(": ")
        raise invalid(f"open.video.patches.{field}", description) from error
    return VideoSource(
        context=video.context,
        patches=patches,
        grid=(video.grid_time, video.grid_rows, video.grid_columns),
        second_per_grid=video.second_per_grid,
        patches_digest=video.patches_digest,
        text_token_ids=tuple(video.text_token_ids),
        prompt_token_ids=tuple(message.prompt_token_ids),
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
        model=drafter.main.name,
        model_fingerprint=drafter.main.fingerprint,
        tokenizer_sha256=drafter.main.tokenizer_sha256,
        device=drafter.main.device.type,
        shm_namespace_id=shm_namespace_id(),
        max_draft_tokens=drafter.config.max_draft_tokens,
        num_sequences=drafter.num_sequences,
        kinds=[
            drafter_pb2.DrafterKind(
                mode=_MODES[kind],
                model=model.name,
                model_fingerprint=model.fingerprint,
                tokenizer_sha256=model.tokenizer_sha256,
                layout=layout_to_proto(model.layout),
            )
            for kind, model in drafter.models_by_kind.items()
        ],
    )


def _kind_violations(message: drafter_pb2.OpenDraft) -> list[FieldViolation]:
    if message.mode not in _KINDS:
        return [FieldViolation("open.mode", "is not a kind of drafts that a drafter makes")]
    if not 0 <= message.visual_budget <= 1:
        return [FieldViolation("open.visual_budget", "must be 0 to 1")]
    if message.mode != answers_pb2.DRAFT_MODE_SMALL:
        return []
    num_visual = sum(span.num_tokens for span in message.visual_spans)
    wrong = []
    if len(message.video.text_token_ids) != message.num_context_tokens - num_visual:
        wrong.append(FieldViolation("open.video.text_token_ids", "must be those of the context outside visual_spans"))
    if len(message.prompt_token_ids) != message.num_prompt_tokens - message.num_context_tokens:
        wrong.append(FieldViolation("open.prompt_token_ids", "must be those between context and answer"))
    if not message.video.context or not message.video.second_per_grid > 0:
        wrong.append(FieldViolation("open.video", "must name its context and the time between its steps"))
    return wrong


def _missing(message: drafter_pb2.OpenDraft) -> list[FieldViolation]:
    present = {
        "sequence_id": bool(message.sequence_id),
        "kv_handle": message.HasField("kv_handle"),
        "context": message.HasField("context"),
        "thread": message.HasField("thread"),
        "selection": message.HasField("selection") or _KINDS.get(message.mode) not in _SELECTED,
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
