"""What is told about answers: one span, a handful of numbers and one line of log each, when they are over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator

import structlog
from opentelemetry import trace
from opentelemetry.metrics import Histogram
from opentelemetry.trace import Span, Status, StatusCode

from foveate.rpc.admission import Admission
from foveate.rpc.errors import FoveateError
from foveate.telemetry import conventions as names
from foveate.telemetry import metrics
from foveate.telemetry.spans import current_log
from gateway.backends import Backends
from gateway.rounds import Stages
from gateway.statistics import Statistics
from gateway.tracing import recorded
from gateway.values import AnswerStats, Event, Finished, Question, Started

logger = structlog.get_logger(__name__)


class AnswerMetrics:
    """The numbers of answers. Everything is recorded once per answer, from its statistics: a round costs nothing."""

    def __init__(self) -> None:
        counter, histogram = metrics.counter, metrics.histogram
        self.num_active = 0
        self.ttft = _seconds(names.METRIC_TTFT, "From the request's arrival to the first token")
        self.tpot = _seconds(names.METRIC_TPOT, "Per output token after the first")
        self.duration = _seconds(names.METRIC_DURATION, "From the request's arrival to its end")
        self.overhead = _seconds(names.METRIC_ROUND_OVERHEAD, "Mean of an answer: round less model time")
        self.tokens = histogram(names.METRIC_TOKENS, "Tokens of a request", unit="{token}", bounds=names.TOKEN_BOUNDS)
        self.length = histogram(
            names.METRIC_ACCEPTANCE_LENGTH,
            "Tokens committed per drafted round, the verifier's own included; mean of an answer",
            unit="{token}",
            bounds=names.LENGTH_BOUNDS,
        )
        self.answers = counter(names.METRIC_ANSWERS, "Answers by how they ended", unit="{answer}")
        self.drafts = counter(names.METRIC_DRAFTS, "Rounds that had a draft", unit="{draft}")
        self.draft_tokens = counter(names.METRIC_DRAFT_TOKENS, "Tokens drafted", unit="{token}")
        self.accepted = counter(names.METRIC_ACCEPTED_TOKENS, "Draft tokens that answers kept", unit="{token}")
        self.accepted_per_pos = counter(
            names.METRIC_ACCEPTED_PER_POS, "Draft tokens kept, by place in the draft", unit="{token}"
        )
        self.loose = counter(names.METRIC_LOOSE_TOKENS, "Kept although the target chose another", unit="{token}")
        metrics.gauge(names.METRIC_ANSWERS_ACTIVE, "Answers that are streaming", lambda: [(self.num_active, {})])

    def finished(self, model: str, finished: Finished) -> None:
        """Records an answer that came to its end."""
        stats, labels = (
            finished.stats,
            {names.GEN_AI_OPERATION: names.OPERATION_CHAT, names.GEN_AI_REQUEST_MODEL: model},
        )
        if finished.num_output_tokens > 1:
            self.tpot.record(stats.decode_ms / 1e3 / (finished.num_output_tokens - 1), labels)
        self.tokens.record(finished.num_prompt_tokens, {**labels, names.GEN_AI_TOKEN_TYPE: "input"})
        self.tokens.record(finished.num_output_tokens, {**labels, names.GEN_AI_TOKEN_TYPE: "output"})
        if stats.num_rounds:
            self.overhead.record(sum(stats.round_overhead_ms) / 1e3 / stats.num_rounds, {})
        if stats.num_draft_rounds:
            self._drafted(stats)

    def _drafted(self, stats: AnswerStats) -> None:
        labels = {names.DRAFT_MODE: stats.draft_mode.name.lower()}
        self.drafts.add(stats.num_draft_rounds, labels)
        self.draft_tokens.add(stats.num_draft_tokens, labels)
        self.accepted.add(stats.num_accepted_tokens, labels)
        self.loose.add(stats.num_loose_tokens, labels)
        self.length.record(stats.num_accepted_tokens / stats.num_draft_rounds + 1, labels)
        for position, number in enumerate(stats.num_accepted_tokens_per_pos):
            self.accepted_per_pos.add(number, {**labels, names.POSITION: position})


def _seconds(name: str, description: str) -> Histogram:
    return metrics.histogram(name, description, unit="s", bounds=names.LATENCY_BOUNDS_S)


class ObservedAnswer:
    """One answer: tell it the question, every event, and it tells the rest."""

    def __init__(self, measured: AnswerMetrics, span: Span) -> None:
        self._measured = measured
        self._span = span
        self._model = ""
        self.num_cached_tokens = 0
        self.finished: Finished | None = None

    @property
    def model(self) -> str:
        """The model that answers; empty until that is known."""
        return self._model

    def begin(self, question: Question, stages: Stages, stats: Statistics) -> tuple[Stages, Statistics]:
        """Returns the stages and statistics to answer with; those of a recorded answer write their times down."""
        self.answers_with(stages)
        log = current_log()
        if log is None:
            return stages, stats
        self._span.set_attributes(_asked(question, self._model))
        log.parent = trace.set_span_in_context(self._span)
        return recorded(stages, stats, log)

    def answers_with(self, stages: Stages) -> None:
        """Takes in what answers; of an answer that is not begun, the rounds are not written down."""
        self._model = stages.served.info.model

    def see(self, event: Event, stats: Statistics) -> None:
        """Takes in an event before it is sent."""
        if isinstance(event, Started):
            self.num_cached_tokens = event.num_cached_tokens
            self._measured.ttft.record(stats.time_to_first_token_s, {names.GEN_AI_REQUEST_MODEL: self._model})
        elif isinstance(event, Finished):
            self.finished = event


class Observer:
    """Observes answers."""

    def __init__(self) -> None:
        self._measured = AnswerMetrics()
        self._tracer = trace.get_tracer(names.SCOPE)

    @contextlib.contextmanager
    def answer(self, context: str) -> Iterator[ObservedAnswer]:
        """Observes one answer for the length of the block, however it ends."""
        start_s = time.perf_counter()
        measured = self._measured
        measured.num_active += 1
        outcome = "INTERNAL"
        with self._span(context) as span:
            observed = ObservedAnswer(measured, span)
            try:
                yield observed
                outcome = "OK" if observed.finished is None else observed.finished.finish_reason.name
            except asyncio.CancelledError:
                outcome = "CANCELLED"
                raise
            except FoveateError as error:
                outcome = error.reason
                raise
            finally:
                measured.num_active -= 1
                duration_s = time.perf_counter() - start_s
                _tell(observed, outcome, span)
                labels = {names.GEN_AI_OPERATION: names.OPERATION_CHAT, names.GEN_AI_REQUEST_MODEL: observed.model}
                measured.duration.record(duration_s, labels)
                measured.answers.add(1, {names.REASON: outcome})
                if observed.finished is not None:
                    measured.finished(observed.model, observed.finished)
                logger.info("answered", outcome=outcome, duration_s=round(duration_s, 4), **_line(observed, context))

    @contextlib.contextmanager
    def _span(self, context: str) -> Iterator[Span]:
        # Only below a recorded call: an answer of its own would be a trace without a caller.
        if current_log() is None:
            yield trace.INVALID_SPAN
            return
        attributes = {names.CONTEXT: context, names.GEN_AI_PROVIDER: names.PROVIDER}
        with self._tracer.start_as_current_span(
            names.SPAN_ANSWER, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            yield span


def observe(backends: Backends, admission: Admission) -> None:
    """Makes the gauges of a gateway. They read plain values, from a thread of the exporter's."""
    metrics.gauge(names.METRIC_QUEUE, "Calls that wait, and for what", lambda: _waiting(backends, admission))
    metrics.gauge(names.METRIC_PEERS_READY, "Services behind this one that can be used", lambda: _peers(backends))
    metrics.gauge(
        names.METRIC_TRANSPORT,
        "1, labelled with how the drafter reads the verifier's KV",
        lambda: [(1, {names.TRANSPORT: backends.kv_transport})],
    )
    if backends.registry.kind == "redis":
        metrics.gauge(
            names.METRIC_BREAKER, "1 while Redis is left alone", lambda: [(int(backends.registry.is_away), {})]
        )
    metrics.counted(
        names.METRIC_REGISTRY_EVENTS,
        "What happened in the registry of contexts and conversations, the breaker's openings among it",
        lambda: [(count, {names.EVENT: event}) for event, count in backends.registry.counters().items()],
    )


def _waiting(backends: Backends, admission: Admission) -> Iterable[tuple[float, metrics.Labels]]:
    yield admission.num_waiting, {names.REASON: "place"}
    yield backends.verifiers.queue.num_waiting, {names.REASON: "verifier"}


def _peers(backends: Backends) -> Iterable[tuple[float, metrics.Labels]]:
    yield backends.verifiers.num_ready, {names.PEER: "verifier"}
    yield backends.drafters.num_ready, {names.PEER: "drafter"}


def _tell(observed: ObservedAnswer, outcome: str, span: Span) -> None:
    finished = observed.finished
    if finished is None:
        if span.is_recording():
            span.set_status(Status(StatusCode.ERROR, outcome))
            span.set_attribute(names.ERROR_TYPE, outcome)
        return
    if span.is_recording():
        span.set_attributes(_answered(observed, finished))


def _asked(question: Question, model: str) -> dict[str, str | int | float]:
    sampling = question.sampling
    asked: dict[str, str | int | float] = {
        names.GEN_AI_OPERATION: names.OPERATION_CHAT,
        names.GEN_AI_REQUEST_MODEL: model,
        names.GEN_AI_MAX_TOKENS: question.max_tokens,
        names.GEN_AI_TEMPERATURE: sampling.temperature,
        names.GEN_AI_TOP_P: sampling.top_p,
        names.GEN_AI_TOP_K: sampling.top_k,
        names.DRAFT_MODE: question.drafting.mode.name,
        names.DRAFT_LENGTH: question.drafting.num_draft_tokens,
    }
    # Beyond an int64 the protocol has no room.
    return asked if sampling.seed is None or sampling.seed >= 2**63 else {**asked, names.GEN_AI_SEED: sampling.seed}


def _answered(observed: ObservedAnswer, finished: Finished) -> dict[str, str | int | float | tuple[str, ...]]:
    stats = finished.stats
    return {
        names.GEN_AI_FINISH_REASONS: (finished.finish_reason.name.lower(),),
        names.GEN_AI_RESPONSE_MODEL: observed.model,
        names.GEN_AI_INPUT_TOKENS: finished.num_prompt_tokens,
        names.GEN_AI_CACHED_TOKENS: observed.num_cached_tokens,
        names.GEN_AI_OUTPUT_TOKENS: finished.num_output_tokens,
        names.POLICY: finished.policy.name,
        names.GUARANTEE: finished.guarantee.name,
        names.DRAFT_MODE: stats.draft_mode.name,
        names.NUM_ROUNDS: stats.num_rounds,
        names.NUM_DRAFT_TOKENS: stats.num_draft_tokens,
        names.NUM_ACCEPTED_TOKENS: stats.num_accepted_tokens,
        names.NUM_LOOSE_TOKENS: stats.num_loose_tokens,
        names.NOTES: finished.notes,
    }


def _line(observed: ObservedAnswer, context: str) -> dict[str, str | int | float]:
    finished = observed.finished
    line: dict[str, str | int | float] = {"context": context}
    if finished is None:
        return line
    stats = finished.stats
    drafted = {"num_draft_tokens": stats.num_draft_tokens, "num_accepted_tokens": stats.num_accepted_tokens}
    return {
        **line,
        **drafted,
        "num_output_tokens": finished.num_output_tokens,
        "num_rounds": stats.num_rounds,
        "draft_mode": stats.draft_mode.name,
        "ttft_ms": round(stats.time_to_first_token_ms, 2),
        "decode_ms": round(stats.decode_ms, 2),
    }
