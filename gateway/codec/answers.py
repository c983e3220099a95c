"""Messages of AnswerService."""

from __future__ import annotations

from foveate.v1 import answers_pb2
from gateway import facts, values
from gateway.validation import AskFields, TurnFields


def ask_fields(request: answers_pb2.AskRequest) -> AskFields:
    """Returns the request as it came: unset is None, enumerations are numbers."""
    sampling, drafting = request.sampling, request.drafting
    return AskFields(
        context=request.context,
        question=request.question,
        history=tuple(TurnFields(int(turn.role), turn.text) for turn in request.history),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        stop=tuple(request.stop),
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        draft_mode=int(drafting.mode),
        num_draft_tokens=drafting.num_draft_tokens if drafting.HasField("num_draft_tokens") else None,
        visual_budget=drafting.visual_budget if drafting.HasField("visual_budget") else None,
        selection=int(drafting.selection),
    )


def event_to_proto(event: values.Event, *, explain: bool) -> answers_pb2.AskResponse:
    """Encodes an event of an answer; `explain` adds the origin and text of every token."""
    if isinstance(event, values.Started):
        started = answers_pb2.AnswerStarted(
            num_prompt_tokens=event.num_prompt_tokens, num_cached_tokens=event.num_cached_tokens
        )
        return answers_pb2.AskResponse(started=started)
    if isinstance(event, values.Delta):
        delta = answers_pb2.AnswerDelta(text=event.text, token_ids=[token.id for token in event.tokens])
        if explain:
            delta.origins.extend([answers_pb2.TokenOrigin.ValueType(token.origin) for token in event.tokens])
            delta.token_texts.extend([token.text for token in event.tokens])
        return answers_pb2.AskResponse(delta=delta)
    finished = answers_pb2.AnswerFinished(
        finish_reason=answers_pb2.FinishReason.ValueType(event.finish_reason),
        guarantee=answers_pb2.Guarantee.ValueType(event.guarantee),
        num_prompt_tokens=event.num_prompt_tokens,
        num_output_tokens=event.num_output_tokens,
        stats=_stats_to_proto(event.stats),
        seed=event.seed,
        notes=event.notes,
    )
    return answers_pb2.AskResponse(finished=finished)


def _stats_to_proto(stats: values.AnswerStats) -> answers_pb2.AnswerStats:
    return answers_pb2.AnswerStats(
        draft_mode=answers_pb2.DraftMode.ValueType(stats.draft_mode),
        num_rounds=stats.num_rounds,
        num_draft_rounds=stats.num_draft_rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_tokens_per_pos=stats.num_accepted_tokens_per_pos,
        num_loose_tokens=stats.num_loose_tokens,
        time_to_first_token_ms=stats.time_to_first_token_ms,
        prefill_ms=stats.prefill_ms,
        draft_ms=stats.draft_ms,
        verify_ms=stats.verify_ms,
        overhead_ms=stats.overhead_ms,
        decode_ms=stats.decode_ms,
        round_overhead_ms=stats.round_overhead_ms,
    )


def server_info_to_proto(info: facts.ServerInfo) -> answers_pb2.GetServerInfoResponse:
    """Encodes what is served."""
    verifier, limits = info.verifier, info.limits
    return answers_pb2.GetServerInfoResponse(
        version=verifier.version,
        model=verifier.model,
        model_fingerprint=verifier.model_fingerprint,
        kv_transport=verifier.kv_transport if info.drafter_ready else "none",
        drafter_ready=info.drafter_ready,
        deterministic=verifier.deterministic,
        device=verifier.device,
        attention_kernel=verifier.attention_kernel,
        limits=answers_pb2.ServerLimits(
            max_upload_bytes=limits.max_upload_bytes,
            max_frames=limits.max_frames,
            max_visual_tokens=limits.max_visual_tokens,
            max_thread_tokens=limits.max_thread_tokens,
            max_draft_tokens=limits.max_draft_tokens,
            default_max_tokens=limits.default_max_tokens,
            default_num_draft_tokens=limits.default_num_draft_tokens,
            default_visual_budget=limits.default_visual_budget,
            default_fps=limits.default_fps,
        ),
        pool_bytes=verifier.pool_bytes,
        pool_used_bytes=verifier.pool_used_bytes,
    )
