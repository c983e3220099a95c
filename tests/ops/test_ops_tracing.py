"""One question, one trace, through three real processes and their device threads, at a real OTLP receiver (G4, G5)."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from bench.otlp import ReceivedSpan, Receiver
from foveate.checkpoints import default_checkpoint
from foveate.client import Client, Context
from foveate.stack import Stack
from foveate.telemetry import conventions as names
from tests.e2e.support import long_answer, wait_until

SERVICES = {"foveate-gateway", "foveate-verifier", "foveate-drafter"}
ASK = "foveate.v1.AnswerService/Ask"
VERIFY = "foveate.v1.VerifierService/Verify"
DRAFT = "foveate.v1.DrafterService/Draft"


def caller(*, sampled: bool = True) -> tuple[str, NonRecordingSpan]:
    """Returns the trace id and the span of a caller whose own tracing is elsewhere."""
    trace_id, flags = secrets.randbits(128), TraceFlags(TraceFlags.SAMPLED if sampled else 0)
    context = SpanContext(trace_id, secrets.randbits(64), is_remote=False, trace_flags=flags)
    return trace.format_trace_id(trace_id), NonRecordingSpan(context)


def spans_of(receiver: Receiver, trace_id: str) -> list[ReceivedSpan]:
    """Waits until the trace has the ends of all three services, and returns it."""

    def is_whole() -> bool:
        found = {(one.service, one.name) for one in receiver.traces().get(trace_id, ())}
        return {("foveate-gateway", ASK), ("foveate-verifier", VERIFY), ("foveate-drafter", DRAFT)} <= found

    assert wait_until(is_whole, 15), [one.name for one in receiver.traces().get(trace_id, ())]
    numbers: list[int] = []
    wait_until(lambda: numbers.append(len(receiver.traces()[trace_id])) or numbers[-30:] == numbers[-1:] * 30, 10)
    return receiver.traces()[trace_id]


def test_one_question_is_one_trace_through_every_process_and_device(
    client: Client, context: Context, receiver: Receiver
) -> None:
    trace_id, span = caller()
    with trace.use_span(span):
        answer = client.ask(context, "Describe the video.")
    spans = spans_of(receiver, trace_id)
    assert {one.service for one in spans} == SERVICES
    ids = {one.span_id for one in spans}
    (root,) = [one for one in spans if one.parent_id not in ids]
    assert (root.name, root.parent_id) == (ASK, trace.format_span_id(span.get_span_context().span_id))
    assert not any(one.is_error for one in spans)

    by_service = {service: [one for one in spans if one.service == service] for service in SERVICES}
    (told,) = [one for one in spans if one.name == names.SPAN_ANSWER]
    stats = answer.stats
    assert told.attributes[names.GEN_AI_OUTPUT_TOKENS] == answer.num_output_tokens
    assert told.attributes[names.GEN_AI_RESPONSE_MODEL] == default_checkpoint().name
    assert 0 < told.attributes[names.GEN_AI_CACHED_TOKENS] < told.attributes[names.GEN_AI_INPUT_TOKENS]
    assert told.attributes[names.NUM_ACCEPTED_TOKENS] == stats.num_accepted_tokens
    assert told.attributes[names.GEN_AI_REQUEST_MODEL] == default_checkpoint().name
    assert told.attributes[names.DRAFT_MODE] == "SPARSE"
    assert told.attributes[names.NUM_LOOSE_TOKENS] == 0
    gateway = [one.name for one in by_service["foveate-gateway"]]
    for name in (names.SPAN_DRAFT, names.SPAN_VERIFY, names.SPAN_POLICY, names.SPAN_DETOKENIZE):
        assert gateway.count(name) == stats.num_rounds, name
    assert gateway.count(names.SPAN_ATTACH) == 1
    rounds = [one for one in by_service["foveate-gateway"] if one.name == names.SPAN_POLICY]
    assert sum(one.attributes[names.NUM_ACCEPTED_TOKENS] for one in rounds) >= stats.num_accepted_tokens

    for service, name, number in (
        ("foveate-verifier", names.SPAN_VERIFY, stats.num_rounds),
        ("foveate-drafter", names.SPAN_DRAFT, stats.num_draft_rounds),
    ):
        on_device = [one for one in by_service[service] if one.name == name]
        assert len(on_device) == number
        assert all(one.attributes[names.THREAD_NAME].startswith("device") for one in on_device)
    verifier = {one.name: one for one in by_service["foveate-verifier"]}
    assert verifier[names.SPAN_CONTEXT_RESOLVE].attributes[names.TIER] == "pool"
    assert verifier[names.SPAN_PREFILL].attributes[names.NUM_TOKENS] > 0


def test_five_questions_at_once_are_five_whole_traces(client: Client, context: Context, receiver: Receiver) -> None:
    def ask(index: int) -> tuple[str, int]:
        trace_id, span = caller()
        with trace.use_span(span):
            return trace_id, client.ask(context, f"Which way does object {index} move?").stats.num_rounds

    with ThreadPoolExecutor(5) as callers:
        asked = list(callers.map(ask, range(5)))
    for trace_id, num_rounds in asked:
        spans = spans_of(receiver, trace_id)
        ids = {one.span_id for one in spans}
        assert [one.name for one in spans if one.parent_id not in ids] == [ASK]
        on_device = [
            one.attributes[names.ROUND]
            for one in spans
            if (one.service, one.name) == ("foveate-verifier", names.SPAN_VERIFY)
        ]
        assert sorted(on_device) == list(range(1, num_rounds + 1))


def test_a_cancelled_answer_is_seen_as_one_and_stops(client: Client, context: Context, receiver: Receiver) -> None:
    plain, options = long_answer(client, context)
    trace_id, span = caller()
    with trace.use_span(span), client.stream(context, plain.question, **options) as stream:
        next(stream)
        next(stream)
    spans = spans_of(receiver, trace_id)
    for name in (ASK, names.SPAN_ANSWER, VERIFY, DRAFT):
        found = [one for one in spans if one.name == name]
        assert found
        assert all(one.is_error for one in found), found
    (asked,) = [one for one in spans if one.name == ASK]
    assert asked.attributes[names.RPC_STATUS_NUMBER] == 1
    assert asked.attributes[names.RPC_STATUS] == "CANCELLED"
    rounds = [one for one in spans if (one.service, one.name) == ("foveate-verifier", names.SPAN_VERIFY)]
    assert len(rounds) < plain.stats.num_rounds


def test_a_deadline_and_a_callers_mistake_have_their_own_status(
    client: Client, context: Context, receiver: Receiver
) -> None:
    from foveate.rpc.errors import DeadlineExceeded, NotFound

    plain, options = long_answer(client, context)
    late, late_span = caller()
    with trace.use_span(late_span), pytest.raises(DeadlineExceeded):
        client.ask(context, plain.question, timeout_s=0.05, **options)
    wrong, wrong_span = caller()
    with trace.use_span(wrong_span), pytest.raises(NotFound):
        client.ask("contexts/" + "0" * 64, "What?")

    def asked(trace_id: str) -> list[ReceivedSpan]:
        return [one for one in receiver.traces().get(trace_id, ()) if one.name == ASK]

    assert wait_until(lambda: bool(asked(late)) and bool(asked(wrong)), 15)
    assert (asked(late)[0].attributes[names.RPC_STATUS_NUMBER], asked(late)[0].is_error) == (4, True)
    assert (asked(wrong)[0].attributes[names.RPC_STATUS_NUMBER], asked(wrong)[0].is_error) == (5, False)


def test_what_the_caller_does_not_sample_is_not_recorded(client: Client, context: Context, receiver: Receiver) -> None:
    trace_id, span = caller(sampled=False)
    with trace.use_span(span):
        client.ask(context, "Describe the video.")
    known, known_span = caller()
    with trace.use_span(known_span):
        client.ask(context, "Describe the video.")
    spans_of(receiver, known)
    assert trace_id not in receiver.traces()


def test_metrics_arrive_too(client: Client, context: Context, receiver: Receiver) -> None:
    client.ask(context, "Describe the video.")
    wanted = {names.METRIC_TTFT, names.METRIC_TPOT, names.METRIC_DRAFTS, names.METRIC_POOL_USED, names.METRIC_SEQUENCES}
    assert wait_until(lambda: wanted <= receiver.metric_names(), 15)


def test_the_logs_have_the_trace_and_no_trouble(client: Client, context: Context, stack: Stack) -> None:
    trace_id, span = caller()
    with trace.use_span(span):
        client.ask(context, "Describe the video.")
    for process in stack.processes:
        told = process.log_path.read_text()
        assert "failed to detach" not in told.lower()
        assert "Traceback" not in told
    assert stack.gateway is not None
    assert any(trace_id in line and "answered" in line for line in stack.gateway.log_path.read_text().splitlines())
