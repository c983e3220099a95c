"""The server's one error mapping: whatever a handler raises leaves as google.rpc.Status, and nothing of ours leaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_status import rpc_status

from foveate.rpc.errors import Cancelled, FoveateError, Internal, from_rpc_error

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class ErrorMappingInterceptor(grpc.aio.ServerInterceptor):
    """Turns FoveateError, a peer's RpcError and any other exception into a status with details.

    An unknown exception is logged with its traceback and leaves as INTERNAL without its text. Cancellation passes.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: grpc answers UNIMPLEMENTED
            return handler
        method = str(handler_call_details.method)
        wrap: Any = _streaming if handler.response_streaming else _unary
        make, inner = _ARITIES[handler.request_streaming, handler.response_streaming]
        behaviour = wrap(getattr(handler, inner), method)
        mapped: grpc.RpcMethodHandler[Any, Any] = make(
            behaviour, handler.request_deserializer, handler.response_serializer
        )
        return mapped


_ARITIES: dict[tuple[bool, bool], tuple[Any, str]] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}


def _unary(inner: Any, method: str) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except BaseException as error:
            await _abort(context, error, method)

    return call


def _streaming(inner: Any, method: str) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            result = inner(request, context)
            if not hasattr(result, "__aiter__"):  # a handler that reads and writes by itself
                await result
                return
            async for response in result:
                yield response
        except GeneratorExit:
            raise
        except BaseException as error:
            await _abort(context, error, method)

    return call


async def _abort(context: Context, error: BaseException, method: str) -> None:
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
