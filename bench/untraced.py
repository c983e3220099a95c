"""A service whose calls can be kept from all tracing, one by one: `python -m bench.untraced MODULE ARGS...`.

A call with the API key `untraced` meets neither the interceptor's span nor a propagated context, here and in the
services behind this one: what it costs is what a build without tracing would. So one process answers with and without,
in turns, and neither its place in memory nor its start tells them apart.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from foveate.rpc.wrapping import ServicerContext
from foveate.telemetry import rpc

KEY = "untraced"
_MARK = ("authorization", f"Bearer {KEY}")
_IS_UNTRACED: ContextVar[bool] = ContextVar("bench_untraced", default=False)


class _Switched(rpc.TracingInterceptor):
    @contextlib.contextmanager
    def _span(self, method: str, context: ServicerContext) -> Iterator[None]:
        if _MARK in {(key, value) for key, value in context.invocation_metadata() or ()}:
            _IS_UNTRACED.set(True)
            yield
            return
        with super()._span(method, context):
            yield


def _marking(traced: Callable[..., Any]) -> Callable[..., Any]:
    def made(method: str, begin: Callable[..., Any], always: rpc.Metadata) -> Callable[..., Any]:
        inner, plain = traced(method, begin, always), traced(method, begin, (*always, _MARK))
        return lambda *args, **kwargs: (plain if _IS_UNTRACED.get() else inner)(*args, **kwargs)

    return made


def main() -> None:
    """Puts the switch in and becomes the module that argv names."""
    import foveate.rpc.server

    foveate.rpc.server.TracingInterceptor = _Switched  # type: ignore[misc]
    rpc._traced = _marking(rpc._traced)
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
