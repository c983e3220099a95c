"""Messages of AnswerService."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from foveate.rpc.errors import FieldViolation, InvalidArgument
from foveate.rpc.fetch_proto import fetch_to_proto
from foveate.v1 import answers_pb2
from gateway import facts, values
from gateway.acceptance import AcceptanceFields
from gateway.validation import AskFields, TurnFields


def ask_fields(request: answers_pb2.AskRequest) -> AskFields:
    """Returns the request as it came: unset is None, enumerations are numbers.

    Raises InvalidArgument for a field that a newer client knows and this server does not: it would go unheeded.
    """
    unknown = tuple(_unknown(request, ""))
    if unknown:
        raise InvalidArgument(
            "the request has fields that this version of the server does not know", violations=unknown
        )
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
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        presence_penalty=sampling.presence_penalty if sampling.HasField("presence_penalty") else None,
        frequency_penalty=sampling.frequency_penalty if sampling.HasField("frequency_penalty") else None,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        min_tokens=sampling.min_tokens if sampling.HasField("min_tokens") else None,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        ignore_eos=request.ignore_eos,
        n=request.n if request.HasField("n") else None,
        draft_mode=int(drafting.mode),
        num_draft_tokens=drafting.num_draft_tokens if drafting.HasField("num_draft_tokens") else None,
        visual_budget=drafting.visual_budget if drafting.HasField("visual_budget") else None,
        selection=int(drafting.selection),
        conversation=request.conversation,
        keep_turns=request.keep_turns if request.HasField("keep_turns") else None,
        branch_of=request.branch_of,
        acceptance=_acceptance_fields(request.acceptance),
    )


def _unknown(message: Message, path: str) -> Iterator[FieldViolation]:
    unknown: Any = UnknownFieldSet(message)  # the stubs do not know that it is a sequence
    for field in unknown:
        yield FieldViolation(f"{path}{field.field_number}", f"is no field of {message.DESCRIPTOR.name} here")
    for described, value in message.ListFields():
        if described.message_type is None or described.message_type.GetOptions().map_entry:
            continue
        for part in (value,) if isinstance(value, Message) else value:
            yield from _unknown(part, f"{path}{described.name}.")


def _acceptance_fields(asked: answers_pb2.Acceptance) -> AcceptanceFields:
    return AcceptanceFields(
        policy=int(asked.policy) or None,
        # The nearest float32 of 0.6 is a little more; a ceiling of 0.6 must admit it.
        lam=round(getattr(asked, "lambda"), 7) if asked.HasField("lambda") else None,
        num_nearest=asked.num_nearest if asked.HasField("num_nearest") else None,
        window=asked.window if asked.HasField("window") else None,
        pool=int(asked.pool) or None,
        threshold=asked.threshold if asked.HasField("threshold") else None,
        entropy_threshold=asked.entropy_threshold if asked.HasField("entropy_threshold") else None,
        variant=int(asked.variant) or None,
        guard_special=asked.guard_special if asked.HasField("guard_special") else None,
        guard_numbers=asked.guard_numbers if asked.HasField("guard_numbers") else None,
        guard_negations=asked.guard_negations if asked.HasField("guard_negations") else None,
        max_loose_run=asked.max_loose_run if asked.HasField("max_loose_run") else None,
        min_probability=asked.min_probability if asked.HasField("min_probability") else None,
        seed=asked.seed if asked.HasField("seed") else None,
    )


def event_to_proto(
    event: values.Event, *, explain: bool, logprobs: bool = False, text_of: Callable[[int], str], index: int = 0
) -> answers_pb2.AskResponse:
    """Encodes an event of answer `index`; `explain` adds origin and text of every token, and what is known of it.

    `text_of` gives the text of a token that is not part of the answer.
    """
    if isinstance(event, values.Started):
        started = answers_pb2.AnswerStarted(
            num_prompt_tokens=event.num_prompt_tokens,
            num_cached_tokens=event.num_cached_tokens,
            fetch=fetch_to_proto(event.fetch),
        )
        return answers_pb2.AskResponse(started=started, index=index)
    if isinstance(event, values.Delta):
        delta = answers_pb2.AnswerDelta(text=event.text, token_ids=[token.id for token in event.tokens])
        if explain:
            delta.origins.extend([answers_pb2.TokenOrigin.ValueType(token.origin) for token in event.tokens])
            delta.token_texts.extend([token.text for token in event.tokens])
            delta.details.extend([_detail_to_proto(token.place, text_of) for token in event.tokens])
        if logprobs:
            delta.logprobs.extend([_logprobs_to_proto(token.place, text_of) for token in event.tokens])
        return answers_pb2.AskResponse(delta=delta, index=index)
    finished = answers_pb2.AnswerFinished(
        finish_reason=answers_pb2.FinishReason.ValueType(event.finish_reason),
        guarantee=answers_pb2.Guarantee.ValueType(event.guarantee),
        num_prompt_tokens=event.num_prompt_tokens,
        num_output_tokens=event.num_output_tokens,
        stats=_stats_to_proto(event.stats),
        seed=event.seed,
        notes=event.notes,
        num_conversation_turns=event.num_conversation_turns,
        policy=answers_pb2.AcceptancePolicy.ValueType(event.policy),
        loose_positions=event.loose_positions if explain else (),
    )
    return answers_pb2.AskResponse(finished=finished, index=index)


def _detail_to_proto(place: values.Place, text_of: Callable[[int], str]) -> answers_pb2.TokenDetail:
    return answers_pb2.TokenDetail(
        round=place.round,
        relevance=place.relevance,
        entropy=place.entropy,
        log_probability=place.log_probability,
        target_token_id=place.target_token_id,
        target_text="" if place.target_token_id is None else text_of(place.target_token_id),
        draft_token_id=place.draft_token_id,
        draft_text="" if place.draft_token_id is None else text_of(place.draft_token_id),
    )


def _logprobs_to_proto(place: values.Place, text_of: Callable[[int], str]) -> answers_pb2.TokenLogprobs:
    assert place.log_probability is not None, "log-probabilities are asked for with logprobs"
    top = place.top or values.TopTokens((), ())
    return answers_pb2.TokenLogprobs(
        logprob=place.log_probability,
        top=[
            answers_pb2.TopLogprob(token_id=token_id, text=text_of(token_id), logprob=logprob)
            for token_id, logprob in zip(top.token_ids, top.log_probabilities, strict=True)
        ],
    )


def _stats_to_proto(stats: values.AnswerStats) -> answers_pb2.AnswerStats:
    return answers_pb2.AnswerStats(
        draft_mode=answers_pb2.DraftMode.ValueType(stats.draft_mode),
        num_rounds=stats.num_rounds,
        num_draft_rounds=stats.num_draft_rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_tokens_per_pos=stats.num_accepted_tokens_per_pos,
        num_loose_tokens=stats.num_loose_tokens,
        num_salvaged_tokens=stats.num_salvaged_tokens,
        time_to_first_token_ms=stats.time_to_first_token_ms,
        prefill_ms=stats.prefill_ms,
        draft_ms=stats.draft_ms,
        verify_ms=stats.verify_ms,
        overhead_ms=stats.overhead_ms,
        decode_ms=stats.decode_ms,
        round_overhead_ms=stats.round_overhead_ms,
        num_rounds_per_draft_length=stats.num_rounds_per_draft_length,
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
            adapts_draft_length=limits.adapts_draft_length,
        ),
        pool_bytes=verifier.pool_bytes,
        pool_used_bytes=verifier.pool_used_bytes,
        num_verifiers=info.num_verifiers,
        registry=info.registry,
        has_cold_tier=verifier.has_cold_tier,
        context_counters=info.context_counters,
        draft_modes=[answers_pb2.DraftMode.ValueType(mode) for mode in sorted(info.draft_modes)],
        default_policy=answers_pb2.AcceptancePolicy.ValueType(limits.acceptance.default),
        allowed_policies=[
            answers_pb2.AcceptancePolicy.ValueType(policy) for policy in sorted(limits.acceptance.allowed)
        ],
        max_lambda=limits.acceptance.max_lambda,
        relevance=_relevance_to_proto(verifier.relevance),
    )


def _relevance_to_proto(info: facts.RelevanceInfo | None) -> answers_pb2.RelevanceInfo | None:
    if info is None:
        return None
    return answers_pb2.RelevanceInfo(
        layer=info.layer,
        at_predicting=info.at_predicting,
        is_centred=info.is_centred,
        num_nearest=info.num_nearest,
        quantiles=info.quantiles,
    )
