"""The server of every service: errors of every arity, health, reflection, pings, drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from foveate.rpc.channel import CHANNEL_OPTIONS, open_channel
from foveate.rpc.errors import NotFound, ResourceExhausted, Unavailable
from foveate.rpc.server import Server, ServiceRegistration, running

SERVICE = "test.Echo"
SECRET = "/home/secret/key"


def peer_failure() -> grpc.aio.AioRpcError:
    status = rpc_status.to_status(Unavailable("no peer", reason="NO_PEER", retry_after_s=2).to_status())
    metadata = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, details=status.details)


FAILURES: dict[bytes, Callable[[], BaseException]] = {
    b"ours": lambda: NotFound("no such thing", resource=("thing", "things/1")),
    b"peer": peer_failure,
    b"bug": lambda: RuntimeError(SECRET),
}


def fail_if_asked(request: bytes) -> bytes:
    if request in FAILURES:
        raise FAILURES[request]()
    return request


class Echo:
    """Handlers of all four arities; those that stream also in grpc.aio's other style, writing by themselves."""

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        return fail_if_asked(request)

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([fail_if_asked(request) async for request in requests])

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield fail_if_asked(request)

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield fail_if_asked(request)

    async def unary_stream_by_hand(self, request: bytes, context: Any) -> None:
        await context.write(b"first")
        await context.write(fail_if_asked(request))

    async def stream_stream_by_hand(self, requests: AsyncIterator[bytes], context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(fail_if_asked(request))

    async def slow(self, request: bytes, context: Any) -> bytes:
        await asyncio.sleep(float(request))
        return b"done"

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "unary_unary": grpc.unary_unary_rpc_method_handler(self.unary_unary),
            "stream_unary": grpc.stream_unary_rpc_method_handler(self.stream_unary),
            "unary_stream": grpc.unary_stream_rpc_method_handler(self.unary_stream),
            "stream_stream": grpc.stream_stream_rpc_method_handler(self.stream_stream),
            "unary_stream_by_hand": grpc.unary_stream_rpc_method_handler(self.unary_stream_by_hand),
            "stream_stream_by_hand": grpc.stream_stream_rpc_method_handler(self.stream_stream_by_hand),
            "slow": grpc.unary_unary_rpc_method_handler(self.slow),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


METHODS = (
    "unary_unary",
    "stream_unary",
    "unary_stream",
    "stream_stream",
    "unary_stream_by_hand",
    "stream_stream_by_hand",
)


def make_server(**settings: Any) -> Server:
    return Server([ServiceRegistration(SERVICE, Echo().add_to)], address="127.0.0.1:0", **settings)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with running(make_server(), grace_s=0) as server, open_channel(f"127.0.0.1:{server.port}") as opened:
        yield opened


async def call(channel: grpc.aio.Channel, method: str, request: bytes) -> list[bytes]:
    path = f"/{SERVICE}/{method}"
    if method.startswith("unary_unary"):
        return [await channel.unary_unary(path)(request)]
    if method.startswith("stream_unary"):
        return [await channel.stream_unary(path)(iter([request]))]
    if method.startswith("unary_stream"):
        return [reply async for reply in channel.unary_stream(path)(request)]
    return [reply async for reply in channel.stream_stream(path)(iter([request]))]


async def failure(
    channel: grpc.aio.Channel, method: str, request: bytes
) -> tuple[grpc.aio.AioRpcError, dict[str, Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, method, request)
    status = rpc_status.from_call(caught.value)
    return caught.value, {detail.type_url.rpartition(".")[2]: detail for detail in status.details}


@pytest.mark.parametrize("method", METHODS)
async def test_what_goes_well(channel: grpc.aio.Channel, method: str) -> None:
    assert (await call(channel, method, b"hello"))[-1] == b"hello"


@pytest.mark.parametrize("method", METHODS)
async def test_our_errors_leave_with_details(channel: grpc.aio.Channel, method: str) -> None:
    error, details = await failure(channel, method, b"ours")
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "no such thing")
    info, resource = error_details_pb2.ErrorInfo(), error_details_pb2.ResourceInfo()
    details["ErrorInfo"].Unpack(info)
    details["ResourceInfo"].Unpack(resource)
    assert (info.domain, info.reason, resource.resource_name) == ("foveate", "NOT_FOUND", "things/1")


@pytest.mark.parametrize("method", METHODS)
async def test_errors_of_a_peer_are_passed_on(channel: grpc.aio.Channel, method: str) -> None:
    error, details = await failure(channel, method, b"peer")
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "no peer")
    retry = error_details_pb2.RetryInfo()
    details["RetryInfo"].Unpack(retry)
    assert retry.retry_delay.seconds == 2


@pytest.mark.parametrize("method", METHODS)
async def test_bugs_are_logged_and_tell_nothing(
    channel: grpc.aio.Channel, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "foveate"):
        error, details = await failure(channel, method, b"bug")
    assert error.code() == grpc.StatusCode.INTERNAL
    assert SECRET not in str(error)
    assert "ErrorInfo" in details
    assert SECRET in caplog.text
    assert method in caplog.text
    assert (await call(channel, method, b"hello"))[-1] == b"hello"


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/nothing")(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_limit_keeps_its_numbers(channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = ResourceExhausted("too large", reason="TOO_LARGE", metadata={"limit": "5"})
    monkeypatch.setitem(FAILURES, b"limit", lambda: limit)
    _, details = await failure(channel, "unary_unary", b"limit")
    info = error_details_pb2.ErrorInfo()
    details["ErrorInfo"].Unpack(info)
    assert (info.reason, dict(info.metadata)) == ("TOO_LARGE", {"limit": "5"})


async def test_health_is_not_serving_until_told() -> None:
    async with running(make_server(), grace_s=0) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving in (False, True, False):
            await server.set_serving(serving)
            for name in ("", SERVICE):
                reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert (reply.status == health_pb2.HealthCheckResponse.SERVING) == serving
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="test.Nobody"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("use_reflection", [True, False])
async def test_reflection_lists_the_services(use_reflection: bool) -> None:
    server = make_server(use_reflection=use_reflection)
    async with running(server, grace_s=0), open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        if not use_reflection:
            with pytest.raises(grpc.aio.AioRpcError):
                _ = [reply async for reply in call]
            return
        [reply] = [reply async for reply in call]
        names = {service.name for service in reply.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_pings_of_a_client_do_not_end_its_call() -> None:
    async with running(make_server(), grace_s=0) as server:
        options = (
            *CHANNEL_OPTIONS,
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
            assert await channel.unary_unary(f"/{SERVICE}/slow")(b"3.5") == b"done"


@pytest.mark.parametrize(("grace_s", "finishes"), [(2.0, True), (0.05, False)])
async def test_stopping_lets_calls_finish_for_the_grace(grace_s: float, finishes: bool) -> None:
    server = make_server()
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        running_call = channel.unary_unary(f"/{SERVICE}/slow")(b"0.6")
        await asyncio.sleep(0.2)
        await server.stop(grace_s)
        if finishes:
            assert await running_call == b"done"
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                await running_call
