"""The life of a service's process: flags with FOVEATE_* defaults, load, serve, drain; one line when it fails."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from foveate.rpc.server import Server, running, wait_for_signal
from foveate.telemetry.setup import NO_TELEMETRY, Telemetry, TelemetryConfig

logger = logging.getLogger(__name__)

# With its event engine, gRPC hands every message from a polling thread to a pool, and only then to Python. Without it,
# the thread that Python waits in polls by itself: a third less time per round trip. Versions of gRPC that have no such
# setting ignore it.
_DIRECT_POLLING = ("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


class Closing(Protocol):
    """What a process loads, serves and closes."""

    async def close(self) -> None:
        """Ends what is running and frees what is held."""


ModelT = TypeVar("ModelT", bound=Closing)


class FlagParser(argparse.ArgumentParser):
    """Flags whose defaults come from FOVEATE_* variables of `environment`."""

    def __init__(self, prog: str, description: str, environment: Mapping[str, str]) -> None:
        super().__init__(prog=prog, description=description)
        self._environment = environment

    def flag(self, name: str, kind: Callable[[str], Any], default: object, text: str) -> None:
        """Adds --NAME; a variable's text is read and checked as the flag's own."""
        variable = "FOVEATE_" + name.replace("-", "_").upper()
        value = self._environment.get(variable, default)
        shown = "" if value in (None, "") else f" (default {value})"
        self.add_argument(f"--{name}", type=kind, default=value, help=f"{text}{shown}; ${variable}")

    def switch(self, name: str, text: str) -> None:
        """Adds --NAME, off unless the variable is 1, true or yes."""
        variable = "FOVEATE_" + name.replace("-", "_").upper()
        is_on = self._environment.get(variable, "").lower() in ("1", "true", "yes")
        self.add_argument(f"--{name}", action="store_true", default=is_on, help=f"{text}; ${variable}")


def positive(text: str) -> int:
    """Returns a whole number of at least 1. Raises ArgumentTypeError or ValueError."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _untold(_: object) -> AbstractAsyncContextManager[None]:
    return contextlib.nullcontext()


async def serve_loaded(
    server: Server,
    load: Callable[[], Coroutine[Any, Any, ModelT]],
    serve: Callable[[ModelT], None],
    *,
    grace_s: float,
    announce: Callable[[ModelT], AbstractAsyncContextManager[None]] = _untold,
) -> None:
    """Runs `server` until SIGTERM or SIGINT: NOT_SERVING while `load` runs, then SERVING, then drains and closes.

    `announce` is entered when it serves, and left before it drains: callers learn first that they should go elsewhere.
    """
    stop = asyncio.create_task(wait_for_signal())
    try:
        async with running(server, grace_s=grace_s):
            loading = asyncio.create_task(load())
            await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
            model = await loading  # also after a signal: a load cannot be stopped, and what it made must be closed
            try:
                # What was loaded stays: a full collection need not walk through it, in the middle of some round.
                gc.collect()
                gc.freeze()
                if not stop.done():
                    serve(model)
                    await server.set_serving(True)
                    say_ready(server.port)
                    async with announce(model):
                        await stop
                await server.stop(grace_s)
            finally:
                await model.close()
    finally:
        stop.cancel()


def say_ready(port: int) -> None:
    """Prints the one line that a service prints to stdout."""
    sys.stdout.write(f"READY {port}\n")
    sys.stdout.flush()


def run_service(
    name: str,
    serve: Callable[[], Coroutine[Any, Any, None]],
    *,
    telemetry: TelemetryConfig = NO_TELEMETRY,
    failures: tuple[type[Exception], ...] = (),
) -> int:
    """Runs `serve` and returns the exit status: 0 after draining; 1, with one line, when it could not start.

    Besides OSError, RuntimeError and ValueError, `failures` say in one line what is wrong. Telemetry lives around it.
    """
    os.environ.setdefault(*_DIRECT_POLLING)  # read when the first channel or server is made
    expected: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError, *failures)
    try:
        with contextlib.closing(Telemetry.start(telemetry)) as started:
            if started.metrics_port is not None:
                logger.info("metrics at port %d", started.metrics_port)
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(serve())
    except expected as error:
        logger.debug("start failed", exc_info=error)
        say_failure(name, error)
        return 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, when it is installed, takes a tenth off each round trip."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def say_failure(name: str, error: Exception) -> None:
    """Writes why a service does not run, as one line, to stderr."""
    sys.stderr.write(f"{name}: {error}".replace("\n", " ").strip() + "\n")
