"""Wrapping a handler of any arity, which grpc.aio leaves to every interceptor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import grpc

ServicerContext = grpc.aio.ServicerContext[Any, Any]
# grpc's own classes take no parameters when the program runs: these are names for the type checker.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]"

_ARITIES: dict[tuple[bool, bool], tuple[Any, str]] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}


def rewrapped(
    handler: Handler,
    *,
    unary: Callable[[Any], Any],
    streaming: Callable[[Any], Any],
    deserializer: Callable[[bytes], Any] | None = None,
) -> Handler:
    """Returns `handler` with its behaviour put through `unary` or, where it streams responses, `streaming`."""
    make, name = _ARITIES[handler.request_streaming, handler.response_streaming]
    wrap = streaming if handler.response_streaming else unary
    read = deserializer or handler.request_deserializer
    wrapped: Handler = make(wrap(getattr(handler, name)), read, handler.response_serializer)
    return wrapped


async def responses_of(inner: Any, request: Any, context: ServicerContext) -> AsyncGenerator[Any]:
    """Yields what a streaming behaviour yields; one that writes by itself is awaited."""
    result = inner(request, context)
    if not hasattr(result, "__aiter__"):
        await result
        return
    async with contextlib.aclosing(result) as responses:
        async for response in responses:
            yield response


def guarded(handler: Handler, guard: Callable[[ServicerContext], AbstractAsyncContextManager[None]]) -> Handler:
    """Returns `handler` running inside `guard` of its call."""

    def unary(inner: Any) -> Any:
        async def call(request: Any, context: ServicerContext) -> Any:
            async with guard(context):
                return await inner(request, context)

        return call

    def streaming(inner: Any) -> Any:
        # Writes rather than yields: a cancellation arrives inside the guard.
        async def call(request: Any, context: ServicerContext) -> None:
            async with guard(context), contextlib.aclosing(responses_of(inner, request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        return call

    return rewrapped(handler, unary=unary, streaming=streaming)
