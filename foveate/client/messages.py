"""Protobuf in, frozen values out, and back: the one place where the client's two faces touch messages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from foveate.client.types import (
    Acceptance,
    Answer,
    AnswerStats,
    AskOptions,
    Context,
    ContextState,
    Delta,
    DraftMode,
    FinishReason,
    FlyVariant,
    Guarantee,
    Origin,
    Policy,
    Pool,
    Progress,
    RelevanceInfo,
    Role,
    Selection,
    ServerInfo,
    ServerLimits,
    Stage,
    TokenDetail,
    TokenLogprobs,
    TopLogprob,
)
from foveate.context_source import ContextFetch, ContextSource
from foveate.rpc.errors import Internal, InvalidArgument, invalid
from foveate.rpc.fetch_proto import fetch_from_proto
from foveate.rpc.video_proto import timings_from_proto, video_from_proto
from foveate.v1 import answers_pb2, contexts_pb2, sampling_pb2

_T = TypeVar("_T")
_TIERS = {int(source): source.name.lower() for source in ContextSource}
_UINT32_MAX = 2**32 - 1
_STAGES = {
    contexts_pb2.CONTEXT_STAGE_UPLOAD: Stage.UPLOAD,
    contexts_pb2.CONTEXT_STAGE_DECODE: Stage.DECODE,
    contexts_pb2.CONTEXT_STAGE_ENCODE: Stage.ENCODE,
    contexts_pb2.CONTEXT_STAGE_PREFILL: Stage.PREFILL,
}
_ORIGINS = {
    answers_pb2.TOKEN_ORIGIN_ACCEPTED: Origin.ACCEPTED,
    answers_pb2.TOKEN_ORIGIN_RECOVERED: Origin.RECOVERED,
    answers_pb2.TOKEN_ORIGIN_BONUS: Origin.BONUS,
    answers_pb2.TOKEN_ORIGIN_PLAIN: Origin.PLAIN,
    answers_pb2.TOKEN_ORIGIN_LOOSE: Origin.LOOSE,
    answers_pb2.TOKEN_ORIGIN_SALVAGED: Origin.SALVAGED,
}
_FINISH_REASONS = {
    answers_pb2.FINISH_REASON_EOS: FinishReason.EOS,
    answers_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    answers_pb2.FINISH_REASON_STOP: FinishReason.STOP,
}
_GUARANTEES = {
    answers_pb2.GUARANTEE_LOSSLESS: Guarantee.LOSSLESS,
    answers_pb2.GUARANTEE_LOOSE: Guarantee.LOOSE,
    answers_pb2.GUARANTEE_LOSSY_CONTEXT: Guarantee.LOSSY_CONTEXT,
}
_ROLES = {Role.USER: answers_pb2.ROLE_USER, Role.ASSISTANT: answers_pb2.ROLE_ASSISTANT}
_DRAFT_MODES = {
    DraftMode.OFF: answers_pb2.DRAFT_MODE_OFF,
    DraftMode.SPARSE: answers_pb2.DRAFT_MODE_SPARSE,
    DraftMode.NGRAM: answers_pb2.DRAFT_MODE_NGRAM,
    DraftMode.STREAMING: answers_pb2.DRAFT_MODE_STREAMING,
    DraftMode.LAYERSKIP: answers_pb2.DRAFT_MODE_LAYERSKIP,
    DraftMode.SMALL: answers_pb2.DRAFT_MODE_SMALL,
}
_DRAFT_MODES_BACK = {number: mode for mode, number in _DRAFT_MODES.items()}
_SELECTIONS = {
    Selection.ATTENTION: answers_pb2.SELECTION_METHOD_ATTENTION,
    Selection.RANDOM: answers_pb2.SELECTION_METHOD_RANDOM,
    Selection.RECENT: answers_pb2.SELECTION_METHOD_RECENT,
    Selection.TWO_STAGE: answers_pb2.SELECTION_METHOD_TWO_STAGE,
    Selection.UNIFORM: answers_pb2.SELECTION_METHOD_UNIFORM,
}
_POLICIES = {
    Policy.EXACT: answers_pb2.ACCEPTANCE_POLICY_EXACT,
    Policy.LVSPEC: answers_pb2.ACCEPTANCE_POLICY_LVSPEC,
    Policy.FLY: answers_pb2.ACCEPTANCE_POLICY_FLY,
    Policy.FLY_GATE: answers_pb2.ACCEPTANCE_POLICY_FLY_GATE,
    Policy.RANDOM: answers_pb2.ACCEPTANCE_POLICY_RANDOM,
}
_POLICIES_BACK = {number: policy for policy, number in _POLICIES.items()}
_POOLS = {
    Pool.PER_ROUND: answers_pb2.RELEVANCE_POOL_PER_ROUND,
    Pool.RUNNING: answers_pb2.RELEVANCE_POOL_RUNNING,
    Pool.THRESHOLD: answers_pb2.RELEVANCE_POOL_THRESHOLD,
}
_VARIANTS = {FlyVariant.CODE: answers_pb2.FLY_VARIANT_CODE, FlyVariant.PAPER: answers_pb2.FLY_VARIANT_PAPER}


def frame_sampling(
    fps: float | None, max_frames: int | None, stored_fps: float | None = None
) -> contexts_pb2.FrameSampling:
    """Returns the message; what is None stays unset. Raises InvalidArgument for numbers the wire cannot carry."""
    _check_range("sampling.max_frames", max_frames, 0, _UINT32_MAX)
    return contexts_pb2.FrameSampling(fps=fps, max_frames=max_frames, stored_fps=stored_fps)


def ask_request(context: Context | str, question: str, options: AskOptions) -> answers_pb2.AskRequest:
    """Returns the message of a question. Raises InvalidArgument for values the wire cannot carry; the server judges."""
    unknown = options.keys() - AskOptions.__optional_keys__
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    _check_range("max_tokens", options.get("max_tokens"), -(2**31), 2**31 - 1)
    _check_range("sampling.top_k", options.get("top_k"), 0, _UINT32_MAX)
    _check_range("sampling.seed", options.get("seed"), 0, 2**64 - 1)
    for token_id in options.get("logit_bias") or {}:
        _check_range(f"sampling.logit_bias[{token_id}]", token_id, 0, _UINT32_MAX)
    _check_range("sampling.min_tokens", options.get("min_tokens"), 0, _UINT32_MAX)
    _check_range("top_logprobs", options.get("top_logprobs"), 0, _UINT32_MAX)
    _check_range("n", options.get("n"), 0, _UINT32_MAX)
    _check_range("keep_turns", options.get("keep_turns"), 0, _UINT32_MAX)
    _check_range("drafting.num_draft_tokens", options.get("num_draft_tokens"), 0, _UINT32_MAX)
    stop = options.get("stop") or ()
    return answers_pb2.AskRequest(
        context=context_name(context) if context or not options.get("conversation") else "",
        question=question,
        history=[answers_pb2.Turn(role=_ROLES[turn.role], text=turn.text) for turn in options.get("history") or ()],
        max_tokens=options.get("max_tokens"),
        stop=[stop] if isinstance(stop, str) else stop,
        sampling=sampling_pb2.SamplingParams(
            temperature=options.get("temperature"),
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
            seed=options.get("seed"),
            repetition_penalty=options.get("repetition_penalty"),
            presence_penalty=options.get("presence_penalty"),
            frequency_penalty=options.get("frequency_penalty"),
            logit_bias=options.get("logit_bias"),
            min_tokens=options.get("min_tokens"),
        ),
        drafting=answers_pb2.Drafting(
            mode=_draft_mode(options.get("draft")),
            num_draft_tokens=options.get("num_draft_tokens"),
            visual_budget=options.get("visual_budget"),
            selection=_selection(options.get("selection")),
        ),
        explain=options.get("explain", False),
        logprobs=options.get("logprobs", False),
        top_logprobs=options.get("top_logprobs") or 0,
        ignore_eos=options.get("ignore_eos", False),
        n=options.get("n"),
        conversation=options.get("conversation") or "",
        keep_turns=options.get("keep_turns"),
        branch_of=options.get("branch_of") or "",
        acceptance=_acceptance(options.get("acceptance")),
    )


def check_one_answer(options: AskOptions) -> None:
    """Raises InvalidArgument when several answers are asked for."""
    if options.get("n") not in (None, 1):
        raise invalid("n", "must be 1: ask returns one answer, ask_n returns all of them")


def _acceptance(asked: Acceptance | None) -> answers_pb2.Acceptance | None:
    if asked is None:
        return None
    for field in ("num_nearest", "window", "max_loose_run"):
        _check_range(f"acceptance.{field}", getattr(asked, field), 0, _UINT32_MAX)
    _check_range("acceptance.seed", asked.seed, 0, 2**64 - 1)
    message = answers_pb2.Acceptance(
        policy=answers_pb2.ACCEPTANCE_POLICY_UNSPECIFIED if asked.policy is None else _POLICIES[Policy(asked.policy)],
        num_nearest=asked.num_nearest,
        window=asked.window,
        pool=answers_pb2.RELEVANCE_POOL_UNSPECIFIED if asked.pool is None else _POOLS[Pool(asked.pool)],
        threshold=asked.threshold,
        entropy_threshold=asked.entropy_threshold,
        variant=answers_pb2.FLY_VARIANT_UNSPECIFIED if asked.variant is None else _VARIANTS[FlyVariant(asked.variant)],
        guard_special=asked.guard_special,
        guard_numbers=asked.guard_numbers,
        guard_negations=asked.guard_negations,
        max_loose_run=asked.max_loose_run,
        min_probability=asked.min_probability,
        seed=asked.seed,
    )
    if asked.lam is not None:
        setattr(message, "lambda", asked.lam)  # a keyword of Python, not of the contract
    return message


def _draft_mode(mode: DraftMode | None) -> answers_pb2.DraftMode.ValueType:
    return answers_pb2.DRAFT_MODE_UNSPECIFIED if mode is None else _DRAFT_MODES[DraftMode(mode)]


def _selection(method: Selection | None) -> answers_pb2.SelectionMethod.ValueType:
    return answers_pb2.SELECTION_METHOD_UNSPECIFIED if method is None else _SELECTIONS[Selection(method)]


def _check_range(field: str, value: int | None, lowest: int, highest: int) -> None:
    if value is not None and not lowest <= value <= highest:
        raise invalid(field, f"must be from {lowest} to {highest}, not {value}")


def context_from_proto(message: contexts_pb2.Context) -> Context:
    """Returns a context."""
    return Context(
        name=message.name,
        video=video_from_proto(message.video),
        num_visual_tokens=message.num_visual_tokens,
        num_tokens=message.num_tokens,
        kv_bytes=message.kv_bytes,
        create_time=_time(message.create_time),
        reused=message.reused,
        timings=timings_from_proto(message.timings),
        state=ContextState.COLD if message.state == contexts_pb2.CONTEXT_STATE_COLD else ContextState.READY,
        expire_time=_time(message.expire_time) if message.HasField("expire_time") else None,
        tiers={_TIERS[use.tier]: use.num_bytes for use in message.tiers if use.tier in _TIERS},
        num_hits=message.num_hits,
        pinned=message.pinned,
        fetch=fetch_from_proto(message.fetch),
        media_sha256=message.media_sha256,
        lossy=message.lossy,
    )


def _time(stamp: Timestamp) -> datetime:
    return datetime.fromtimestamp(stamp.ToMicroseconds() / 1e6, UTC)


def progress_from_proto(message: contexts_pb2.ContextProgress) -> Progress | None:
    """Returns the progress, or None for a stage that a newer server invented."""
    stage = _STAGES.get(message.stage)
    return None if stage is None else Progress(stage, message.done, message.total)


def delta_from_proto(message: answers_pb2.AnswerDelta, index: int = 0) -> Delta:
    """Returns a delta of answer `index`."""
    origins = tuple(_ORIGINS.get(origin, Origin.PLAIN) for origin in message.origins)
    details = tuple(_detail_from_proto(detail) for detail in message.details)
    logprobs = tuple(
        TokenLogprobs(one.logprob, tuple(TopLogprob(top.token_id, top.text, top.logprob) for top in one.top))
        for one in message.logprobs
    )
    texts = tuple(message.token_texts)
    return Delta(message.text, tuple(message.token_ids), origins, texts, details, logprobs, index)


def _detail_from_proto(message: answers_pb2.TokenDetail) -> TokenDetail:
    return TokenDetail(
        round=message.round,
        relevance=message.relevance if message.HasField("relevance") else None,
        entropy=message.entropy if message.HasField("entropy") else None,
        log_probability=message.log_probability if message.HasField("log_probability") else None,
        target_token_id=message.target_token_id if message.HasField("target_token_id") else None,
        target_text=message.target_text,
        draft_token_id=message.draft_token_id if message.HasField("draft_token_id") else None,
        draft_text=message.draft_text,
    )


def server_info_from_proto(message: answers_pb2.GetServerInfoResponse) -> ServerInfo:
    """Returns the server's facts."""
    limits = message.limits
    return ServerInfo(
        version=message.version,
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        kv_transport=message.kv_transport,
        drafter_ready=message.drafter_ready,
        deterministic=message.deterministic,
        device=message.device,
        attention_kernel=message.attention_kernel,
        pool_bytes=message.pool_bytes,
        pool_used_bytes=message.pool_used_bytes,
        limits=ServerLimits(
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
        num_verifiers=message.num_verifiers,
        registry=message.registry,
        has_cold_tier=message.has_cold_tier,
        context_counters=dict(message.context_counters),
        draft_modes=tuple(_DRAFT_MODES_BACK[mode] for mode in message.draft_modes if mode in _DRAFT_MODES_BACK),
        default_policy=_POLICIES_BACK.get(message.default_policy, Policy.EXACT),
        allowed_policies=tuple(_POLICIES_BACK[one] for one in message.allowed_policies if one in _POLICIES_BACK),
        max_lambda=message.max_lambda,
        relevance=_relevance_from_proto(message.relevance) if message.HasField("relevance") else None,
    )


def _relevance_from_proto(message: answers_pb2.RelevanceInfo) -> RelevanceInfo:
    return RelevanceInfo(
        layer=message.layer,
        at_predicting=message.at_predicting,
        is_centred=message.is_centred,
        num_nearest=message.num_nearest,
        quantiles=tuple(message.quantiles),
    )


def stats_from_proto(message: answers_pb2.AnswerStats) -> AnswerStats:
    """Returns the counts and times of an answer."""
    return AnswerStats(
        draft_mode=_DRAFT_MODES_BACK.get(message.draft_mode),
        num_rounds=message.num_rounds,
        num_draft_rounds=message.num_draft_rounds,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(message.num_accepted_tokens_per_pos),
        num_loose_tokens=message.num_loose_tokens,
        num_salvaged_tokens=message.num_salvaged_tokens,
        time_to_first_token_ms=message.time_to_first_token_ms,
        prefill_ms=message.prefill_ms,
        draft_ms=message.draft_ms,
        verify_ms=message.verify_ms,
        overhead_ms=message.overhead_ms,
        decode_ms=message.decode_ms,
        round_overhead_ms=tuple(message.round_overhead_ms),
        num_rounds_per_draft_length=tuple(message.num_rounds_per_draft_length),
    )


class AnswersBuilder:
    """Folds the messages of an answers' stream into deltas and, at the end, the answers."""

    def __init__(self, request: answers_pb2.AskRequest) -> None:
        self._num_answers = request.n if request.HasField("n") else 1
        self._builders = {0: _AnswerBuilder(request)}
        self._request = request

    def feed(self, response: answers_pb2.AskResponse) -> Delta | None:
        """Takes the next message; returns the delta if it is one. Raises Internal for an answer never asked for."""
        index = response.index
        if index >= self._num_answers:
            raise Internal(f"the server sent answer {index} of {self._num_answers}", reason="ANSWER_UNASKED")
        if index not in self._builders:
            self._builders[index] = _AnswerBuilder(self._request)
        return self._builders[index].feed(response)

    def result(self) -> Answer:
        """Returns the first answer. Raises Internal when the stream ended without its last message."""
        return self._builders[0].result()

    def results(self) -> tuple[Answer, ...]:
        """Returns all answers, in order. Raises Internal when the stream ended without the end of one."""
        missing = [index for index in range(self._num_answers) if index not in self._builders]
        if missing:
            raise Internal(f"the server left out answer {missing[0]}", reason="ANSWER_CUT_SHORT")
        return tuple(self._builders[index].result() for index in range(self._num_answers))


class _AnswerBuilder:
    def __init__(self, request: answers_pb2.AskRequest) -> None:
        self._request = request
        self._deltas: list[Delta] = []
        self._num_cached_tokens = 0
        self._fetch: ContextFetch | None = None
        self._finished: answers_pb2.AnswerFinished | None = None

    def feed(self, response: answers_pb2.AskResponse) -> Delta | None:
        event = response.WhichOneof("event")
        if event == "started":
            self._num_cached_tokens = response.started.num_cached_tokens
            self._fetch = fetch_from_proto(response.started.fetch)
        elif event == "finished":
            self._finished = response.finished
        elif event == "delta":
            delta = delta_from_proto(response.delta, response.index)
            self._deltas.append(delta)
            return delta
        return None

    def result(self) -> Answer:
        finished = self._finished
        if finished is None:
            raise Internal("the server ended the answer without its statistics", reason="ANSWER_CUT_SHORT")
        if finished.finish_reason not in _FINISH_REASONS or finished.guarantee not in _GUARANTEES:
            raise Internal("the server's version is newer than this client: unknown finish reason or guarantee")
        return Answer(
            context=self._request.context,
            question=self._request.question,
            text="".join(delta.text for delta in self._deltas),
            token_ids=tuple(_chained(delta.token_ids for delta in self._deltas)),
            origins=tuple(_chained(delta.origins for delta in self._deltas)),
            token_texts=tuple(_chained(delta.token_texts for delta in self._deltas)),
            details=tuple(_chained(delta.details for delta in self._deltas)),
            finish_reason=_FINISH_REASONS[finished.finish_reason],
            guarantee=_GUARANTEES[finished.guarantee],
            policy=_POLICIES_BACK.get(finished.policy, Policy.EXACT),
            loose_positions=tuple(finished.loose_positions),
            num_prompt_tokens=finished.num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=finished.num_output_tokens,
            stats=stats_from_proto(finished.stats),
            seed=finished.seed if finished.HasField("seed") else None,
            notes=tuple(finished.notes),
            fetch=self._fetch,
            num_conversation_turns=finished.num_conversation_turns,
            logprobs=tuple(_chained(delta.logprobs for delta in self._deltas)),
        )


class ContextBuilder:
    """Folds the messages of CreateContext or WatchContext into progress and, at the end, the context."""

    def __init__(self) -> None:
        self._context: Context | None = None

    def feed(self, response: contexts_pb2.CreateContextResponse | contexts_pb2.WatchContextResponse) -> Progress | None:
        """Takes the next message; returns the progress if it is one."""
        event = response.WhichOneof("event")
        if event == "context":
            self._context = context_from_proto(response.context)
        return progress_from_proto(response.progress) if event == "progress" else None

    def result(self) -> Context:
        """Returns the context. Raises Internal when the stream ended without it."""
        if self._context is None:
            raise Internal("the server ended the stream without a context", reason="CONTEXT_MISSING")
        return self._context


def list_request(
    state: ContextState | None, media_sha256: str, *, page_size: int, page_token: str
) -> contexts_pb2.ListContextsRequest:
    """Returns the request for a page of contexts."""
    states = {
        None: contexts_pb2.CONTEXT_STATE_UNSPECIFIED,
        ContextState.READY: contexts_pb2.CONTEXT_STATE_READY,
        ContextState.COLD: contexts_pb2.CONTEXT_STATE_COLD,
    }
    return contexts_pb2.ListContextsRequest(
        page_size=page_size, page_token=page_token, state=states[state], media_sha256=media_sha256
    )


def watch_request(request_id: str | None, context: Context | str | None) -> contexts_pb2.WatchContextRequest:
    """Returns the message; exactly one of the two must be given."""
    if (request_id is None) == (context is None):
        raise invalid("target", "give either request_id or context")
    if request_id is not None:
        return contexts_pb2.WatchContextRequest(request_id=request_id)
    return contexts_pb2.WatchContextRequest(name=context_name(context or ""))


def context_name(context: Context | str) -> str:
    """Returns the resource name; a bare id is taken for "contexts/{id}"."""
    name = context if isinstance(context, str) else context.name
    if not name:
        raise InvalidArgument("the context's name is empty")
    return name if "/" in name else f"contexts/{name}"


def _chained(parts: Iterable[tuple[_T, ...]]) -> Iterable[_T]:
    return (item for part in parts for item in part)
