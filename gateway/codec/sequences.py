"""Messages of VerifierService and DrafterService."""

from __future__ import annotations

from foveate.v1 import answers_pb2, drafter_pb2, sampling_pb2, verifier_pb2
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
    )


def open_sequence(question: values.Question) -> verifier_pb2.OpenSequence:
    """Encodes the start of a sequence; a selection is asked for only when a sparse drafter will use it."""
    drafting = question.drafting
    is_sparse = drafting.mode is values.DraftMode.SPARSE
    turns = [answers_pb2.Turn(role=answers_pb2.Role.ValueType(turn.role), text=turn.text) for turn in question.history]
    return verifier_pb2.OpenSequence(
        context=question.context,
        history=turns,
        question=question.text,
        sampling=sampling_to_proto(question.sampling),
        max_tokens=question.max_tokens,
        visual_budget=drafting.visual_budget if is_sparse else None,
        selection=answers_pb2.SelectionMethod.ValueType(drafting.selection),
    )


def sampling_to_proto(sampling: values.Sampling) -> sampling_pb2.SamplingParams:
    """Encodes sampling with every value set."""
    return sampling_pb2.SamplingParams(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed
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
        kv=message.SerializeToString(),
    )


def drafter_info(message: drafter_pb2.GetDrafterInfoResponse) -> facts.DrafterInfo:
    """Decodes what the drafter runs."""
    return facts.DrafterInfo(message.version, message.model, message.model_fingerprint, message.max_draft_tokens)


def open_draft(question: values.Question, sequence: values.OpenedSequence) -> drafter_pb2.OpenDraft:
    """Encodes the attachment of a drafter to a sequence."""
    opened = verifier_pb2.SequenceOpened.FromString(sequence.kv)
    return drafter_pb2.OpenDraft(
        sequence_id=opened.sequence_id,
        kv_handle=opened.kv_handle,
        context=opened.context,
        thread=opened.thread,
        selection=opened.selection,
        num_context_tokens=opened.num_context_tokens,
        num_prompt_tokens=opened.num_prompt_tokens,
        visual_spans=opened.visual_spans,
        position_delta=opened.position_delta,
        sampling=sampling_to_proto(question.sampling),
        max_tokens=question.max_tokens,
    )
