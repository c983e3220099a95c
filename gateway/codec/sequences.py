"""Messages of VerifierService and DrafterService."""

from __future__ import annotations

from foveate.context_source import FROM_POOL
from foveate.rpc.fetch_proto import fetch_from_proto
from foveate.v1 import answers_pb2, drafter_pb2, kv_pb2, sampling_pb2, verifier_pb2
from gateway import facts, values


def verifier_info(message: verifier_pb2.GetVerifierInfoResponse) -> facts.VerifierInfo:
    """Decodes what the verifier runs."""
    limits = message.limits
    return facts.VerifierInfo(
        version=message.version,
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        tokenizer_sha256=message.tokenizer_sha256,
        eos_token_ids=frozenset(message.eos_token_ids),
        kv_transport=message.kv_handle.WhichOneof("transport") or "none",
        pool_bytes=message.kv_handle.pool_bytes,
        pool_used_bytes=message.pool_used_bytes,
        device=message.device,
        deterministic=message.deterministic,
        attention_kernel=message.attention_kernel,
        max_upload_bytes=limits.max_upload_bytes,
        max_frames=limits.max_frames,
        max_visual_tokens=limits.max_visual_tokens,
        max_thread_tokens=limits.max_thread_tokens,
        max_draft_tokens=limits.max_draft_tokens,
        default_fps=limits.default_fps,
        pool_id=message.kv_handle.pool_id,
        num_sequences=message.num_sequences,
        has_cold_tier=message.has_cold_tier,
        context_counters=dict(message.context_counters),
        layout=_layout(message.kv_handle),
        relevance=_relevance(message.relevance) if message.HasField("relevance") else None,
    )


def _relevance(message: answers_pb2.RelevanceInfo) -> facts.RelevanceInfo:
    return facts.RelevanceInfo(
        layer=message.layer,
        at_predicting=message.at_predicting,
        is_centred=message.is_centred,
        num_nearest=message.num_nearest,
        quantiles=tuple(message.quantiles),
    )


def open_sequence(question: values.Question) -> verifier_pb2.OpenSequence:
    """Encodes the start of a sequence; selection and video are asked for only when a drafter will use them."""
    drafting = question.drafting
    is_selected = drafting.mode in (values.DraftMode.SPARSE, values.DraftMode.SMALL)
    turns = [answers_pb2.Turn(role=answers_pb2.Role.ValueType(turn.role), text=turn.text) for turn in question.history]
    is_known = any(turn.token_ids for turn in question.history)
    return verifier_pb2.OpenSequence(
        context=question.context,
        history=turns,
        history_token_ids=[verifier_pb2.TurnTokens(token_ids=turn.token_ids) for turn in question.history if is_known],
        question=question.text,
        sampling=sampling_to_proto(question.sampling),
        max_tokens=question.max_tokens,
        visual_budget=drafting.visual_budget if is_selected else None,
        selection=answers_pb2.SelectionMethod.ValueType(drafting.selection),
        tenant=question.tenant,
        answer_token_ids=question.answer_token_ids,
        keep_thread=question.keep_thread,
        wants_video=drafting.mode is values.DraftMode.SMALL,
        signals=_signals_to_proto(question.signals),
        fork_of=question.fork_of,
    )


def _signals_to_proto(signals: values.Signals) -> verifier_pb2.Signals:
    return verifier_pb2.Signals(
        relevance=signals.relevance,
        num_nearest=signals.num_nearest,
        entropy=signals.entropy,
        log_probabilities=signals.log_probabilities,
        num_top_log_probabilities=signals.num_top,
    )


def measured(message: verifier_pb2.RoundVerified) -> values.Measured:
    """Decodes what was measured in a round."""
    return values.Measured(
        relevance=tuple(message.relevance),
        entropy=tuple(message.entropy),
        draft_log_probabilities=tuple(message.draft_log_probabilities),
        target_log_probabilities=tuple(message.target_log_probabilities),
        top=tuple(_top(top) for top in message.top) if message.top else (),
    )


def _top(message: verifier_pb2.TopTokens) -> values.TopTokens:
    return values.TopTokens(tuple(message.token_ids), tuple(message.log_probabilities))


def sampling_to_proto(sampling: values.Sampling) -> sampling_pb2.SamplingParams:
    """Encodes sampling with every value set."""
    return sampling_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
    )


def opened_sequence(message: verifier_pb2.SequenceOpened) -> values.OpenedSequence:
    """Decodes an open sequence."""
    num_thread_tokens = message.num_prompt_tokens - message.num_context_tokens
    return values.OpenedSequence(
        sequence_id=message.sequence_id,
        num_context_tokens=message.num_context_tokens,
        num_prompt_tokens=message.num_prompt_tokens,
        prompt_token_ids=tuple(message.prompt_token_ids),
        first_token_id=message.first_token_id,
        room=message.thread.capacity - num_thread_tokens,
        prefill_us=message.prefill_us,
        fetch=fetch_from_proto(message.fetch) or FROM_POOL,
        num_reused_tokens=message.num_reused_tokens,
        is_context_lossy=message.lossy_context,
        first_place=values.Place(
            log_probability=message.first_log_probability if message.HasField("first_log_probability") else None,
            top=_top(message.first_top) if message.HasField("first_top") else None,
        ),
        kv=message.SerializeToString(),
        kv_namespace=message.kv_handle.shm.namespace_id,
    )


def drafter_info(message: drafter_pb2.GetDrafterInfoResponse) -> facts.DrafterInfo:
    """Decodes what the drafter runs."""
    kinds = tuple(
        facts.DrafterKind(
            values.DraftMode(kind.mode),
            kind.model,
            kind.model_fingerprint,
            kind.tokenizer_sha256,
            _layout(kind.layout),
        )
        for kind in message.kinds
        if int(kind.mode) in values.SERVICE_MODES
    )
    return facts.DrafterInfo(
        message.version,
        message.model,
        message.model_fingerprint,
        message.max_draft_tokens,
        kinds,
        message.shm_namespace_id,
    )


def _layout(message: kv_pb2.KvHandle | kv_pb2.KvLayout) -> facts.KvLayout:
    return facts.KvLayout(message.dtype, message.num_layers, message.num_kv_heads, message.head_dim)


def open_draft(question: values.Question, sequence: values.OpenedSequence) -> drafter_pb2.OpenDraft:
    """Encodes the attachment of a drafter to a sequence."""
    opened = verifier_pb2.SequenceOpened.FromString(sequence.kv)
    mode = question.drafting.mode
    is_small = mode is values.DraftMode.SMALL
    return drafter_pb2.OpenDraft(
        mode=answers_pb2.DraftMode.ValueType(mode),
        visual_budget=question.drafting.visual_budget or 0.0,
        video=opened.video if is_small else None,
        prompt_token_ids=opened.prompt_token_ids if is_small else (),
        sequence_id=opened.sequence_id,
        kv_handle=opened.kv_handle,
        context=opened.context,
        thread=opened.thread,
        selection=opened.selection if opened.HasField("selection") else None,
        num_context_tokens=opened.num_context_tokens,
        num_prompt_tokens=opened.num_prompt_tokens,
        visual_spans=opened.visual_spans,
        position_delta=opened.position_delta,
        sampling=sampling_to_proto(question.sampling),
        max_tokens=question.max_tokens,
        penalized_token_ids=opened.penalized_token_ids,
    )
