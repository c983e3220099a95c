"""Protobuf to values and back; what is wrong with a message is said with its field's path."""

from __future__ import annotations

from engine.handle_proto import handle_to_proto, selection_to_proto, slab_to_proto, tensor_to_proto
from engine.kv_pool import PoolHandle
from engine.relevance import MAX_NEAREST, RelevanceSettings
from engine.sampling_proto import sampling_from_proto, sampling_violations
from engine.selection import SelectionMethod
from foveate import __version__
from foveate.rpc.errors import FieldViolation, InvalidArgument, invalid
from foveate.rpc.fetch_proto import fetch_to_proto
from foveate.v1 import answers_pb2, contexts_pb2, kv_pb2, verifier_pb2
from verifier_svc.config import VerifierConfig
from verifier_svc.identity import parse_context_name
from verifier_svc.progress import Progress, Stage
from verifier_svc.prompt import Role, Turn
from verifier_svc.receiving import UploadChunk
from verifier_svc.round_guard import Round, TopTokens, Verified
from verifier_svc.sequences import Opened, Video
from verifier_svc.sessions import OpenRequest
from verifier_svc.signals import MAX_TOP, Signals
from verifier_svc.verifier import ContextSpec, Verifier

MAX_QUESTION_BYTES = 32 * 1024
MAX_HISTORY_BYTES = 256 * 1024

_ROLES = {answers_pb2.ROLE_USER: Role.USER, answers_pb2.ROLE_ASSISTANT: Role.ASSISTANT}
_METHODS = {
    answers_pb2.SELECTION_METHOD_UNSPECIFIED: SelectionMethod.ATTENTION,
    answers_pb2.SELECTION_METHOD_ATTENTION: SelectionMethod.ATTENTION,
    answers_pb2.SELECTION_METHOD_RANDOM: SelectionMethod.RANDOM,
    answers_pb2.SELECTION_METHOD_RECENT: SelectionMethod.RECENT,
    answers_pb2.SELECTION_METHOD_TWO_STAGE: SelectionMethod.TWO_STAGE,
    answers_pb2.SELECTION_METHOD_UNIFORM: SelectionMethod.UNIFORM,
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
        raise invalid("spec.source", "must be an upload, a path or a URL")
    sampling = spec.sampling
    return ContextSpec(
        path=spec.path if source == "path" else None,
        url=spec.url if source == "url" else None,
        total_bytes=spec.upload.total_bytes,
        fps=sampling.fps if sampling.HasField("fps") else None,
        max_frames=sampling.max_frames if sampling.HasField("max_frames") else None,
        stored_fps=sampling.stored_fps if sampling.HasField("stored_fps") else None,
        tenant=request.tenant,
        usable_pool_ids=frozenset(request.usable_pool_ids),
        request_id=spec.request_id,
        sha256=spec.upload.sha256.lower(),
    )


def parse_chunk(request: verifier_pb2.PrefillRequest) -> UploadChunk:
    """Reads a later message to Prefill."""
    if request.WhichOneof("payload") != "chunk":
        raise invalid("chunk", "must follow the spec, and nothing else")
    return UploadChunk(request.chunk.write_offset, request.chunk.data)


def parse_open(message: verifier_pb2.OpenSequence, *, vocab_size: int) -> OpenRequest:
    """Reads what starts a sequence; token ids must be below `vocab_size`."""
    violations = _question_violations(message)
    violations += sampling_violations(message.sampling, "open.sampling", vocab_size=vocab_size)
    if message.max_tokens < 1:
        violations.append(FieldViolation("open.max_tokens", "must be at least 1"))
    if message.HasField("visual_budget") and not 0 <= message.visual_budget <= 1:
        violations.append(FieldViolation("open.visual_budget", "must be in [0, 1]"))
    if message.selection not in _METHODS:
        violations.append(FieldViolation("open.selection", "is not a known method"))
    violations.extend(_token_violations(message, vocab_size))
    if message.signals.HasField("num_nearest") and not 1 <= message.signals.num_nearest <= MAX_NEAREST:
        violations.append(FieldViolation("open.signals.num_nearest", f"must be 1 to {MAX_NEAREST}"))
    if message.signals.num_top_log_probabilities > MAX_TOP:
        violations.append(FieldViolation("open.signals.num_top_log_probabilities", f"must be at most {MAX_TOP}"))
    if violations:
        raise InvalidArgument("the sequence cannot be opened", violations=violations)
    return OpenRequest(
        context_id=parse_context_name(message.context, "open.context"),
        history=_history(message),
        question=message.question,
        sampling=sampling_from_proto(message.sampling),
        max_tokens=message.max_tokens,
        num_selected=message.num_selected if message.HasField("num_selected") else None,
        visual_budget=message.visual_budget if message.HasField("visual_budget") else None,
        selection=_METHODS[message.selection],
        tenant=message.tenant,
        answer_token_ids=tuple(message.answer_token_ids),
        keep_thread=message.keep_thread,
        fork_of=message.fork_of,
        signals=_signals(message.signals),
        wants_video=message.wants_video,
    )


def _history(message: verifier_pb2.OpenSequence) -> tuple[Turn, ...]:
    token_ids = [tuple(one.token_ids) for one in message.history_token_ids] or [()] * len(message.history)
    return tuple(Turn(_ROLES[turn.role], turn.text, ids) for turn, ids in zip(message.history, token_ids, strict=True))


def _signals(message: verifier_pb2.Signals) -> Signals:
    return Signals(
        relevance=message.relevance,
        num_nearest=message.num_nearest if message.HasField("num_nearest") else None,
        entropy=message.entropy,
        log_probabilities=message.log_probabilities,
        num_top=message.num_top_log_probabilities,
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


def _token_violations(message: verifier_pb2.OpenSequence, vocab_size: int) -> list[FieldViolation]:
    violations = []
    if not all(token_id < vocab_size for token_id in message.answer_token_ids):
        violations.append(FieldViolation("open.answer_token_ids", f"must be below {vocab_size}"))
    if not all(token_id < vocab_size for turn in message.history_token_ids for token_id in turn.token_ids):
        violations.append(FieldViolation("open.history_token_ids", f"must be below {vocab_size}"))
    if len(message.history_token_ids) not in (0, len(message.history)):
        violations.append(FieldViolation("open.history_token_ids", "must be as many as history, or none"))
    return violations


def progress_message(progress: Progress) -> contexts_pb2.ContextProgress:
    """Returns the message of a stage's progress."""
    return contexts_pb2.ContextProgress(
        stage=_STAGES[progress.stage], done=progress.done, total=max(progress.total, progress.done)
    )


def opened_message(opened: Opened, handle: PoolHandle) -> verifier_pb2.SequenceOpened:
    """Returns the message of an open sequence."""
    message = verifier_pb2.SequenceOpened(
        sequence_id=opened.sequence_id,
        kv_handle=handle_to_proto(handle),
        context=slab_to_proto(opened.context_slab),
        thread=slab_to_proto(opened.thread_slab),
        num_context_tokens=opened.num_context_tokens,
        num_prompt_tokens=opened.num_prompt_tokens,
        visual_spans=[kv_pb2.VisualSpan(start=start, num_tokens=number) for start, number in opened.visual_spans],
        position_delta=opened.position_delta,
        first_token_id=opened.first_token_id,
        prompt_token_ids=opened.prompt_token_ids,
        prefill_us=opened.prefill_us,
        fetch=fetch_to_proto(opened.fetch),
        num_reused_tokens=opened.num_reused_tokens,
        lossy_context=opened.is_context_lossy,
        penalized_token_ids=opened.penalized_token_ids,
    )
    if opened.measured.target_log_probabilities:
        message.first_log_probability = opened.measured.target_log_probabilities[0]
    if opened.measured.top:
        message.first_top.CopyFrom(_top_message(opened.measured.top[0]))
    if opened.selection is not None:
        message.selection.SetInParent()  # an empty selection is a selection; copying it alone would leave it unset
        message.selection.CopyFrom(selection_to_proto(opened.selection))
    if opened.video is not None:
        message.video.CopyFrom(_video_message(opened.video))
    return message


def _video_message(video: Video) -> kv_pb2.VideoSource:
    time, rows, columns = video.grid
    return kv_pb2.VideoSource(
        context=video.context,
        patches=tensor_to_proto(video.patches),
        grid_time=time,
        grid_rows=rows,
        grid_columns=columns,
        second_per_grid=video.second_per_grid,
        patches_digest=video.patches_digest,
        text_token_ids=video.text_token_ids,
    )


def verified_message(verified: Verified) -> verifier_pb2.RoundVerified:
    """Returns the message of a verified round."""
    message = verifier_pb2.RoundVerified(
        round=verified.round,
        base_len=verified.base_len,
        target_token_ids=verified.target_token_ids,
        model_us=verified.model_us,
        relevance=verified.measured.relevance,
        entropy=verified.measured.entropy,
        draft_log_probabilities=verified.measured.draft_log_probabilities,
        target_log_probabilities=verified.measured.target_log_probabilities,
    )
    if verified.measured.top:
        message.top.extend([_top_message(top) for top in verified.measured.top])
    return message


def _top_message(top: TopTokens) -> verifier_pb2.TopTokens:
    return verifier_pb2.TopTokens(token_ids=top.token_ids, log_probabilities=top.log_probabilities)


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
        has_cold_tier=verifier.redis is not None,
        context_counters=verifier.context_counters(),
        relevance=_relevance_message(parts.relevance) if config.keep_visual_states else None,
    )


def _relevance_message(settings: RelevanceSettings) -> answers_pb2.RelevanceInfo:
    return answers_pb2.RelevanceInfo(
        layer=settings.layer,
        at_predicting=settings.at_predicting,
        is_centred=settings.is_centred,
        num_nearest=settings.num_nearest,
        quantiles=settings.quantiles,
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
