"""The server's one error mapping: whatever a handler raises leaves as google.rpc.Status, and nothing of ours leaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from foveate.rpc.errors import Cancelled, FoveateError, Internal, InvalidArgument, from_rpc_error
from foveate.rpc.wrapping import Continuation, Handler, ServicerContext, responses_of, rewrapped

logger = logging.getLogger(__name__)


class ErrorMappingInterceptor(grpc.aio.ServerInterceptor):
    """Turns FoveateError, a peer's RpcError and any other exception into a status with details.

    An unknown exception is logged with its traceback and leaves as INTERNAL without its text. Cancellation passes.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: grpc answers UNIMPLEMENTED
            return handler
        method = str(handler_call_details.method)
        readable = _well_formed(handler)
        return rewrapped(
            readable, unary=lambda inner: _unary(inner, method), streaming=lambda inner: _streaming(inner, method)
        )


@dataclass(frozen=True)
class _Malformed:
    """Stands for a request whose bytes are no message; gRPC itself would answer INTERNAL."""


def _well_formed(handler: Handler) -> Handler:
    """Returns `handler` reading requests so that malformed ones raise InvalidArgument inside of it."""
    deserialize = handler.request_deserializer

    def read(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError:
            return _Malformed()

    def checked(inner: Any) -> Any:
        if handler.request_streaming:
            return lambda requests, context: inner(_each_checked(requests), context)
        return lambda request, context: inner(_checked(request), context)

    return rewrapped(handler, unary=checked, streaming=checked, deserializer=read)


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidArgument("the request is no message of its type", reason="MALFORMED_MESSAGE")
    return request


async def _each_checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _unary(inner: Any, method: str) -> Callable[[Any, ServicerContext], Awaitable[Any]]:
    async def call(request: Any, context: ServicerContext) -> Any:
        try:
            return await inner(request, context)
        except BaseException as error:
            await _abort(context, error, method)

    return call


def _streaming(inner: Any, method: str) -> Callable[[Any, ServicerContext], AsyncIterator[Any]]:
    async def call(request: Any, context: ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in responses_of(inner, request, context):
                yield response
        except GeneratorExit:
            raise
        except BaseException as error:
            await _abort(context, error, method)

    return call


async def _abort(context: ServicerContext, error: BaseException, method: str) -> None:
    if isinstance(error, asyncio.CancelledError | grpc.aio.AbortError | KeyboardInterrupt | SystemExit):
        raise error
    mapped = _map(error, method)
    await context.abort_with_status(rpc_status.to_status(mapped.to_status()))


def _map(error: BaseException, method: str) -> FoveateError:
    if isinstance(error, FoveateError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error)
    if isinstance(error, grpc.aio.UsageError):  # the stream was closed under the handler
        return Cancelled("the call was closed by its caller")
    logger.error("unhandled error in %s", method, exc_info=error)
    return Internal("internal error; the server's log has the details")
