"""The server every Foveate service runs in: health, reflection, error mapping, keepalive, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from foveate.rpc.channel import MAX_MESSAGE_BYTES
from foveate.rpc.interceptors import ErrorMappingInterceptor
from foveate.rpc.security import ServerTls
from foveate.telemetry.rpc import TracingInterceptor
from foveate.telemetry.spans import SpanMaker

logger = logging.getLogger(__name__)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients may ping every second while a handler is silent for long, without being told to go away.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A caller whose connection is half-open answers no ping: what its calls hold is freed after 50 s, not after hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True)
class ServiceRegistration:
    """A service to serve: its full name, as "foveate.v1.AnswerService", and what adds its servicer to a server."""

    full_name: str
    add_to: Callable[[grpc.aio.Server], None]


class Server:
    """A gRPC server whose services report NOT_SERVING until `set_serving(True)` and drain on `stop`.

    Raises OSError when it cannot listen on `address` or cannot read the files of `tls`.
    """

    def __init__(
        self,
        registrations: Sequence[ServiceRegistration],
        *,
        address: str,
        use_reflection: bool = True,
        tls: ServerTls | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`interceptors` run inside the tracing and the error mapping: what they raise is mapped and seen."""
        self._names = [registration.full_name for registration in registrations]
        self._spans = SpanMaker()
        chain = (TracingInterceptor(self._spans), ErrorMappingInterceptor(), *interceptors)
        self._server = grpc.aio.server(interceptors=chain, options=SERVER_OPTIONS)
        for registration in registrations:
            registration.add_to(self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if use_reflection:
            names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self.port = _bound(self._server, address, tls)

    async def start(self) -> None:
        """Starts answering; every service, and the server as a whole (""), is NOT_SERVING."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of all services and of the server as a whole."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once, lets running ones finish for `grace_s` seconds, then cancels them."""
        await self.set_serving(False)
        await self._server.stop(grace_s)
        await self._spans.drain()


def _bound(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    # Returns the port. gRPC's own words end with a debugging hint that helps nobody.
    try:
        if tls is not None:
            return server.add_secure_port(address, tls.credentials())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error


@contextlib.asynccontextmanager
async def running(server: Server, *, grace_s: float) -> AsyncIterator[Server]:
    """Runs `server` for the length of the block and always stops it."""
    await server.start()
    try:
        yield server
    finally:
        await asyncio.shield(server.stop(grace_s))


async def wait_for_signal() -> signal.Signals:
    """Waits for SIGTERM or SIGINT; a second signal while the caller drains is ignored."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return await received
