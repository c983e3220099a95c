"""What tracing costs an answer that is not recorded: a few calls at its ends, none in its rounds."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from foveate.telemetry.spans import SpanLog
from tests.fakes import FakeDrafter, FakeVerifier, ToyModel, ask, running_stack, until

TEXT = "The red square moves left and then the blue circle moves right. " * 6
MODEL = ToyModel.of(TEXT)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts every call of tracing there is: into the API, into the SDK, into the logs of recorded calls."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    count(type(provider.get_tracer("any")), "start_span")
    for owner, name in (
        (SpanLog, "add"),
        (otel_context, "attach"),
        (trace, "set_span_in_context"),
        (trace, "get_current_span"),
        (propagate, "inject"),
        (propagate, "extract"),
    ):
        count(owner, name)
    return counts


async def cost_of(max_tokens: int, counted: Counter[str], *, is_sampled: bool) -> tuple[int, Counter[str]]:
    """Returns the number of rounds of an answer, and what it counted once everything about it is over."""
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=0.5)) as stack:
        await ask(stack)
        backends = stack.backends
        backends._config = replace(backends._config, health_interval_s=60.0)  # looks at peers are calls as well
        await asyncio.sleep(0.1)
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else 0)
        caller = NonRecordingSpan(SpanContext(secrets.randbits(128), secrets.randbits(64), True, flags))
        counted.clear()
        with trace.use_span(caller):
            answer = await ask(stack, max_tokens=max_tokens)
        num_rounds = answer.finished.stats.num_rounds
        if is_sampled:
            await until(lambda: counted["add"] > 4 * num_rounds)
        return num_rounds, counted.copy()


async def test_an_answer_that_is_not_sampled_costs_the_same_however_long_it_is(counted: Counter[str]) -> None:
    few, short = await cost_of(4, counted, is_sampled=False)
    many, long = await cost_of(100, counted, is_sampled=False)
    assert many > 5 * few
    assert long == short
    assert long["add"] == 0
    assert long["start_span"] == long["extract"] == 3  # Ask, Verify, Draft: where each service decides, once a stream


async def test_the_same_counts_rise_with_the_rounds_of_one_that_is_recorded(counted: Counter[str]) -> None:
    few, short = await cost_of(4, counted, is_sampled=True)
    many, long = await cost_of(100, counted, is_sampled=True)
    assert many > 5 * few
    assert long["add"] - short["add"] == 4 * (many - few)  # draft, verify, policy, detokenize
