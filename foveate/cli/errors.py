"""Errors as one clear line and an exit code that scripts can act on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import FrameType
from typing import Any

import grpc
import typer

from foveate.cli.output import Output
from foveate.rpc.errors import FoveateError


class ExitCode(IntEnum):
    """Exit codes, as `foveate --help` lists them."""

    OK = 0
    OTHER = 1
    USAGE = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 4
    RESOURCE_EXHAUSTED = 5
    UNAVAILABLE = 6
    DEADLINE = 7
    INTERRUPTED = 130
    TERMINATED = 143


EXIT_CODES_HELP = (
    "Exit codes: 0 ok, 1 other error, 2 usage, 3 invalid argument, 4 not found, 5 resource exhausted, 6 unavailable, "
    "7 deadline passed, 130 interrupted, 143 terminated."
)

_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: ExitCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND: ExitCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ExitCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE: ExitCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.DEADLINE,
}

_TERMINATING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM, or a terminal that is closed, raised where Ctrl-C would be, so that the same `finally` blocks run."""


@contextlib.contextmanager
def reported(output: Output) -> Iterator[None]:
    """Runs a command's body; whatever it raises becomes a message and typer.Exit with the code."""
    try:
        with _termination_raises():
            yield
    except FoveateError as error:
        _print_error(output, error)
        raise typer.Exit(_BY_STATUS.get(error.code, ExitCode.OTHER)) from None
    except Terminated:
        raise typer.Exit(ExitCode.TERMINATED) from None
    except KeyboardInterrupt:
        output.err.print("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our output went away; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(ExitCode.OTHER) from None


def _print_error(output: Output, error: FoveateError) -> None:
    message = " ".join(error.message.splitlines()[:1])
    output.err.print("[bold red]error:[/]", _escaped(message))
    for line in error.message.splitlines()[1:]:
        output.err.print(f"  {_escaped(line)}", style="dim")
    for violation in error.violations:
        if violation.description not in message:
            output.err.print(f"  {_escaped(violation.field)}: {_escaped(violation.description)}")
    if error.retry_after_s is not None:
        output.err.print(f"  it may work again in {error.retry_after_s:.3g} s")
    if output.as_json:
        output.print_json({"error": _error_object(error)})


def _error_object(error: FoveateError) -> dict[str, Any]:
    return {
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "metadata": dict(error.metadata),
        "violations": [{"field": one.field, "description": one.description} for one in error.violations],
        "retry_after_s": error.retry_after_s,
    }


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Terminated

    # What is ignored stays ignored: nohup means it.
    numbers = [number for number in _TERMINATING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def cancelled_by_signals(cancel: Callable[[], None]) -> Iterator[None]:
    """While a call runs, the first signal calls `cancel` in a thread of its own, and is raised once the call has ended.

    An exception at an arbitrary place inside gRPC could leave one of its locks taken, and whoever needs it waiting for
    ever. A second signal raises at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)
        threading.Thread(target=cancel, daemon=True).start()

    numbers = [number for number in (signal.SIGINT, *_TERMINATING) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    except FoveateError:
        if not received:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt if received[0] == signal.SIGINT else Terminated


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores Ctrl-C and terminating signals, for a clean-up that is short and must end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_TERMINATING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
