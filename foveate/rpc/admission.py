"""Who may work now: a bound on calls that run, a bounded queue before it, and shares per tenant.

    admitted at once    a place is free and the tenant is below its share
    waits               in order of arrival; a tenant at its share does not hold up those behind it
    refused at once     the queue is full, the tenant is too fast, or the wait would outlast the caller's deadline

Everything refused is RESOURCE_EXHAUSTED with RetryInfo, and names need and limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import grpc

from foveate.rpc.errors import ResourceExhausted
from foveate.rpc.security import ApiKeys
from foveate.rpc.wrapping import Continuation, Handler, ServicerContext, guarded
from foveate.telemetry import conventions as names
from foveate.telemetry import metrics

ANONYMOUS = ""
_OPEN = ("/grpc.health.", "/grpc.reflection.")
_WEIGHT_OF_NEWEST = 0.1
_TENANT: ContextVar[str] = ContextVar("foveate_tenant", default=ANONYMOUS)


def current_tenant() -> str:
    """Returns the tenant whose key the call carried; empty where no keys are asked for."""
    return _TENANT.get()


def refuse_beyond(limit: int, num_open: int) -> None:
    """Raises ResourceExhausted, with the time after which to try again, when `limit` sequences are open already."""
    if num_open >= limit:
        raise ResourceExhausted(
            f"{num_open} answers are open; the limit is {limit}",
            reason="TOO_MANY_SEQUENCES",
            metadata={"needed": str(num_open + 1), "limit": str(limit)},
            retry_after_s=1.0,
        )


@dataclass(frozen=True)
class AdmissionLimits:
    """Bounds on calls that do work. Of a tenant, 0 means no bound."""

    max_running: int = 64
    max_waiting: int = 256
    max_running_per_tenant: int = 0
    max_per_second_per_tenant: float = 0.0


@dataclass
class _Bucket:
    """Calls a tenant may still begin: refilled all the time, never above one second's worth (or one)."""

    tokens: float
    at_s: float


@dataclass
class _Waiter:
    tenant: str
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Admits calls. Used from one event loop."""

    def __init__(self, limits: AdmissionLimits, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock_s = clock_s
        self._running: Counter[str] = Counter()
        self._waiting: deque[_Waiter] = deque()
        self._buckets: dict[str, _Bucket] = {}
        self._typical_s = 0.0
        self._refused = metrics.counter(names.METRIC_REFUSED, "Calls that were refused before they began")

    @property
    def num_running(self) -> int:
        """Calls that were admitted and have not ended."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """Calls in the queue."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def admitted(self, tenant: str, remaining_s: float | None) -> AsyncIterator[None]:
        """Holds a place for the length of the block. Raises ResourceExhausted; may be cancelled while it waits."""
        self._take_token(tenant)
        if self._has_place(tenant):  # nobody who waits has one: they are admitted whenever a call ends
            self._running[tenant] += 1
        else:
            await self._wait(tenant, remaining_s)
        start_s = self._clock_s()
        try:
            yield
        finally:
            self._learn(self._clock_s() - start_s)
            self._leave(tenant)

    def expected_wait_s(self) -> float:
        """Returns how long a call that joins the queue now will wait, judged by those that ended before."""
        return self._typical_s * (len(self._waiting) + 1) / self._limits.max_running

    async def _wait(self, tenant: str, remaining_s: float | None) -> None:
        limits = self._limits
        if len(self._waiting) >= limits.max_waiting:
            raise self._refusal(
                "the queue is full", "QUEUE_FULL", len(self._waiting) + 1, limits.max_waiting, self._retry_s()
            )
        wait_s = self.expected_wait_s()
        if remaining_s is not None and wait_s > remaining_s:
            message = f"the wait of about {wait_s:.1f} s would outlast the deadline, which is in {remaining_s:.1f} s"
            raise self._refusal(message, "DEADLINE_TOO_SHORT", wait_s, remaining_s, self._retry_s())
        waiter = _Waiter(tenant)
        self._waiting.append(waiter)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self._leave(tenant)  # admitted in the very moment it went away
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(waiter)
            raise

    def _admit_waiting(self) -> None:
        passed_over: list[_Waiter] = []
        while self._waiting and self.num_running < self._limits.max_running:
            waiter = self._waiting.popleft()
            if waiter.admitted.done():
                continue
            if self._has_place(waiter.tenant):
                self._running[waiter.tenant] += 1
                waiter.admitted.set_result(None)
            else:
                passed_over.append(waiter)
        self._waiting.extendleft(reversed(passed_over))

    def _has_place(self, tenant: str) -> bool:
        share = self._limits.max_running_per_tenant
        return self.num_running < self._limits.max_running and (not share or self._running[tenant] < share)

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._admit_waiting()

    def _take_token(self, tenant: str) -> None:
        rate = self._limits.max_per_second_per_tenant
        if not rate:
            return
        now_s, burst = self._clock_s(), max(1.0, rate)
        bucket = self._buckets.setdefault(tenant, _Bucket(burst, now_s))
        bucket.tokens = min(burst, bucket.tokens + (now_s - bucket.at_s) * rate)
        bucket.at_s = now_s
        if bucket.tokens < 1:
            raise self._refusal("too many calls a second", "RATE_LIMITED", 1, rate, (1 - bucket.tokens) / rate)
        bucket.tokens -= 1

    def _refusal(
        self, message: str, reason: str, needed: float, limit: float, retry_after_s: float
    ) -> ResourceExhausted:
        self._refused.add(1, {names.REASON: reason})
        metadata = {"needed": f"{needed:g}", "limit": f"{limit:g}"}
        return ResourceExhausted(message, reason=reason, metadata=metadata, retry_after_s=retry_after_s)

    def _retry_s(self) -> float:
        return max(0.1, self.expected_wait_s())

    def _learn(self, duration_s: float) -> None:
        weight = _WEIGHT_OF_NEWEST if self._typical_s else 1.0
        self._typical_s += weight * (duration_s - self._typical_s)


class AdmissionInterceptor(grpc.aio.ServerInterceptor):
    """Asks every call for its key, and lets `working` methods work when there is room. Health needs neither.

    `until_ready` holds such a call back, given the seconds to its deadline, before it takes a place: while nobody could
    do the work, waiting calls are no measure of how long work takes.
    """

    def __init__(
        self,
        admission: Admission,
        working: frozenset[str],
        keys: ApiKeys | None = None,
        *,
        until_ready: Callable[[float | None], Awaitable[None]] | None = None,
    ) -> None:
        self._admission = admission
        self._working = working
        self._keys = keys
        self._until_ready = until_ready

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(_OPEN):
            return handler
        if method in self._working:
            return guarded(handler, self._work)
        return guarded(handler, self._look)

    @contextlib.asynccontextmanager
    async def _work(self, context: ServicerContext) -> AsyncIterator[None]:
        self._authenticate(context)
        if self._until_ready is not None:
            await self._until_ready(context.time_remaining())
        async with self._admission.admitted(current_tenant(), context.time_remaining()):
            yield

    @contextlib.asynccontextmanager
    async def _look(self, context: ServicerContext) -> AsyncIterator[None]:
        self._authenticate(context)
        yield

    def _authenticate(self, context: ServicerContext) -> None:
        if self._keys is not None:
            _TENANT.set(self._keys.tenant_of(_text_metadata(context)))


def _text_metadata(context: ServicerContext) -> Mapping[str, str]:
    entries: Any = context.invocation_metadata() or ()
    return {key: value for key, value in entries if isinstance(value, str)}
