"""Protobuf to values and back; what is wrong with a message is said with its field's path."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from engine.handle_proto import handle_to_proto, selection_to_proto, slab_to_proto
from engine.kv_pool import PoolHandle
from engine.sampling_proto import sampling_from_proto, sampling_violations
from engine.selection import SelectionMethod
from foveate import __version__
from foveate.rpc.errors import FieldViolation, InvalidArgument, invalid
from foveate.rpc.video_proto import timings_to_proto, video_to_proto
from foveate.v1 import answers_pb2, contexts_pb2, kv_pb2, verifier_pb2
from verifier_svc.config import VerifierConfig
from verifier_svc.contexts import ContextFacts
from verifier_svc.identity import parse_context_name
from verifier_svc.progress import Progress, Stage
from verifier_svc.prompt import Role, Turn
from verifier_svc.round_guard import Round, Verified
from verifier_svc.sequences import Opened
from verifier_svc.sessions import OpenRequest
from verifier_svc.verifier import ContextSpec, UploadChunk, Verifier

MAX_QUESTION_BYTES = 32 * 1024
MAX_HISTORY_BYTES = 256 * 1024

_ROLES = {answers_pb2.ROLE_USER: Role.USER, answers_pb2.ROLE_ASSISTANT: Role.ASSISTANT}
_METHODS = {
    answers_pb2.SELECTION_METHOD_UNSPECIFIED: SelectionMethod.ATTENTION,
    answers_pb2.SELECTION_METHOD_ATTENTION: SelectionMethod.ATTENTION,
    answers_pb2.SELECTION_METHOD_RANDOM: SelectionMethod.RANDOM,
    answers_pb2.SELECTION_METHOD_RECENT: SelectionMethod.RECENT,
}
_STAGES = {
    Stage.UPLOAD: contexts_pb2.CONTEXT_STAGE_UPLOAD,
    Stage.DECODE: contexts_pb2.CONTEXT_STAGE_DECODE,
    Stage.ENCODE: contexts_pb2.CONTEXT_STAGE_ENCODE,
    Stage.PREFILL: contexts_pb2.CONTEXT_STAGE_PREFILL,
}


def parse_spec(request: verifier_pb2.PrefillRequest) -> ContextSpec:
    """Reads the first message to Prefill."""
    if request.WhichOneof("payload") != "spec":
        raise invalid("spec", "must be the first message")
    spec = request.spec
    source = spec.WhichOneof("source")
    if source is None:
        raise invalid("spec.source", "must be an upload or a path")
    sampling = spec.sampling
    return ContextSpec(
        path=spec.path if source == "path" else None,
        total_bytes=spec.upload.total_bytes,
        fps=sampling.fps if sampling.HasField("fps") else None,
        max_frames=sampling.max_frames if sampling.HasField("max_frames") else None,
    )


def parse_chunk(request: verifier_pb2.PrefillRequest) -> UploadChunk:
    """Reads a later message to Prefill."""
    if request.WhichOneof("payload") != "chunk":
        raise invalid("chunk", "must follow the spec, and nothing else")
    return UploadChunk(request.chunk.write_offset, request.chunk.data)


def parse_open(message: verifier_pb2.OpenSequence) -> OpenRequest:
    """Reads what starts a sequence."""
    violations = [*_question_violations(message), *sampling_violations(message.sampling, "open.sampling")]
    if message.max_tokens < 1:
        violations.append(FieldViolation("open.max_tokens", "must be at least 1"))
    if message.HasField("visual_budget") and not 0 <= message.visual_budget <= 1:
        violations.append(FieldViolation("open.visual_budget", "must be in [0, 1]"))
    if message.selection not in _METHODS:
        violations.append(FieldViolation("open.selection", "is not a known method"))
    if violations:
        raise InvalidArgument("the sequence cannot be opened", violations=violations)
    return OpenRequest(
        context_id=parse_context_name(message.context, "open.context"),
        history=tuple(Turn(_ROLES[turn.role], turn.text) for turn in message.history),
        question=message.question,
        sampling=sampling_from_proto(message.sampling),
        max_tokens=message.max_tokens,
        num_selected=message.num_selected if message.HasField("num_selected") else None,
        visual_budget=message.visual_budget if message.HasField("visual_budget") else None,
        selection=_METHODS[message.selection],
    )


def parse_round(message: verifier_pb2.VerifyRound) -> Round:
    """Reads a round; whether it may run is the sequence's to say."""
    return Round(
        sequence_id=message.sequence_id,
        round=message.round,
        base_len=message.base_len,
        token_ids=tuple(message.token_ids),
        draft_token_ids=tuple(message.draft_token_ids),
    )


def _question_violations(message: verifier_pb2.OpenSequence) -> list[FieldViolation]:
    violations = []
    if not message.question.strip():
        violations.append(FieldViolation("open.question", "must not be empty"))
    if len(message.question.encode()) > MAX_QUESTION_BYTES:
        violations.append(FieldViolation("open.question", f"must be at most {MAX_QUESTION_BYTES} bytes"))
    roles = [turn.role for turn in message.history]
    expected = [answers_pb2.ROLE_USER, answers_pb2.ROLE_ASSISTANT] * (len(roles) // 2)
    if roles != expected:
        violations.append(FieldViolation("open.history", "must alternate from the user to the model, the model last"))
    if sum(len(turn.text.encode()) for turn in message.history) > MAX_HISTORY_BYTES:
        violations.append(FieldViolation("open.history", f"must be at most {MAX_HISTORY_BYTES} bytes in all"))
    return violations


def progress_message(progress: Progress) -> contexts_pb2.ContextProgress:
    """Returns the message of a stage's progress."""
    return contexts_pb2.ContextProgress(
        stage=_STAGES[progress.stage], done=progress.done, total=max(progress.total, progress.done)
    )


def context_message(facts: ContextFacts, *, reused: bool = False) -> contexts_pb2.Context:
    """Returns the message of a context."""
    create_time = Timestamp()
    create_time.FromNanoseconds(facts.create_time_ns)
    return contexts_pb2.Context(
        name=facts.name,
        video=video_to_proto(facts.video),
        num_visual_tokens=facts.num_visual_tokens,
        num_tokens=facts.num_tokens,
        kv_bytes=facts.kv_bytes,
        create_time=create_time,
        reused=reused,
        timings=timings_to_proto(facts.timings),
    )


def opened_message(opened: Opened, handle: PoolHandle) -> verifier_pb2.SequenceOpened:
    """Returns the message of an open sequence."""
    start, num_tokens = opened.visual_span
    message = verifier_pb2.SequenceOpened(
        sequence_id=opened.sequence_id,
        kv_handle=handle_to_proto(handle),
        context=slab_to_proto(opened.context_slab),
        thread=slab_to_proto(opened.thread_slab),
        num_context_tokens=opened.num_context_tokens,
        num_prompt_tokens=opened.num_prompt_tokens,
        visual_spans=[kv_pb2.VisualSpan(start=start, num_tokens=num_tokens)],
        position_delta=opened.position_delta,
        first_token_id=opened.first_token_id,
        prompt_token_ids=opened.prompt_token_ids,
        prefill_us=opened.prefill_us,
    )
    if opened.selection is not None:
        message.selection.SetInParent()  # an empty selection is a selection; copying it alone would leave it unset
        message.selection.CopyFrom(selection_to_proto(opened.selection))
    return message


def verified_message(verified: Verified) -> verifier_pb2.RoundVerified:
    """Returns the message of a verified round."""
    return verifier_pb2.RoundVerified(
        round=verified.round,
        base_len=verified.base_len,
        target_token_ids=verified.target_token_ids,
        model_us=verified.model_us,
    )


def info_message(verifier: Verifier) -> verifier_pb2.GetVerifierInfoResponse:
    """Returns the message of what a verifier runs."""
    parts, config = verifier.parts, verifier.config
    return verifier_pb2.GetVerifierInfoResponse(
        version=__version__,
        model=parts.loaded.name,
        model_fingerprint=parts.loaded.fingerprint,
        tokenizer_sha256=parts.loaded.tokenizer_sha256,
        eos_token_ids=parts.loaded.eos_token_ids,
        kv_handle=handle_to_proto(parts.pool.handle),
        device=parts.loaded.device.type,
        deterministic=verifier.parts.runner.is_deterministic,
        attention_kernel=parts.runner.kernel_name,
        limits=_limits_message(config),
        pool_used_bytes=parts.pool.used_bytes,
        num_sequences=verifier.num_sequences,
    )


def _limits_message(config: VerifierConfig) -> answers_pb2.ServerLimits:
    return answers_pb2.ServerLimits(
        max_upload_bytes=config.media.max_upload_bytes,
        max_frames=config.media.max_frames,
        max_visual_tokens=config.media.max_visual_tokens,
        max_thread_tokens=config.max_thread_tokens,
        max_draft_tokens=config.max_draft_tokens,
        default_fps=config.media.default_fps,
    )
