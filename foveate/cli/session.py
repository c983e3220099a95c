"""A client for a command: to the server that was named, or to a local stack that lives as long as the command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from foveate.checkpoints import default_checkpoint
from foveate.cli.errors import undisturbed
from foveate.cli.output import Output
from foveate.cli.progress import context_progress
from foveate.client import Client, Context
from foveate.client.sync import DEFAULT_TIMEOUT_S
from foveate.rpc.security import ClientTls
from foveate.stack import Stack, StackConfig


@dataclass(frozen=True)
class Target:
    """Whom to ask: `server`, or, when None, a local stack with `model`."""

    server: str | None
    model: Path | None = None
    device: str = "cpu"
    deterministic: bool = False
    use_drafter: bool = True
    small_model: Path | None = None
    deadline_s: float | None = None


@dataclass(frozen=True)
class Video:
    """Which video: a local file, a path below the server's media root, or a context that exists ("contexts/ID")."""

    name: str
    is_on_server: bool = False
    fps: float | None = None
    max_frames: int | None = None


@dataclass(frozen=True)
class Credentials:
    """How to reach a server that does not speak to everybody; set once for the whole command line."""

    api_key: str | None = None
    tls: ClientTls | None = None


_CREDENTIALS: ContextVar[Credentials | None] = ContextVar("foveate_credentials", default=None)


def use_credentials(credentials: Credentials) -> None:
    """Makes every later `open_client` of this command line use them."""
    _CREDENTIALS.set(credentials)


def open_client(server: str, *, timeout_s: float) -> Client:
    """Returns a client of `server` with the credentials that the command line was given."""
    credentials = _CREDENTIALS.get() or Credentials()
    return Client(server, timeout_s=timeout_s, api_key=credentials.api_key, tls=credentials.tls)


@contextlib.contextmanager
def connected(target: Target, output: Output) -> Iterator[Client]:
    """Yields a client; stops the local stack, if it started one, whatever happens."""
    timeout_s = target.deadline_s or DEFAULT_TIMEOUT_S
    if target.server is not None:
        with open_client(target.server, timeout_s=timeout_s) as client:
            yield client
        return
    config = StackConfig(
        model=target.model or default_checkpoint(),
        device=target.device,
        deterministic=target.deterministic,
        use_drafter=target.use_drafter,
        small_model=target.small_model,
    )
    with running_stack(config, output) as stack, Client(stack.addresses.gateway, timeout_s=timeout_s) as client:
        yield client


@contextlib.contextmanager
def running_stack(config: StackConfig, output: Output) -> Iterator[Stack]:
    """Starts a stack behind a spinner, yields it, and stops it; a second Ctrl-C cannot cut the stopping short."""
    stack = Stack(config)
    try:
        with output.err.status("starting a local stack") as spinner:
            stack.start(lambda step: spinner.update(Text(step)))
        yield stack
    finally:
        with undisturbed():
            stack.stop()


def prefill(client: Client, video: Video, output: Output) -> Context:
    """Returns the context of a video, showing progress."""
    if video.name.startswith("contexts/"):
        return client.get_context(video.name)
    with context_progress(output) as on_progress:
        return client.create_context(
            None if video.is_on_server else video.name,
            server_path=video.name if video.is_on_server else None,
            fps=video.fps,
            max_frames=video.max_frames,
            on_progress=on_progress,
        )


def print_context(context: Context, output: Output) -> None:
    """Prints what was read, in one line."""
    video, timings = context.video, context.timings
    how = (
        "reused"
        if context.reused
        else (
            f"decode {timings.decode_ms:.0f} ms, encode {timings.encode_ms:.0f} ms, prefill {timings.prefill_ms:.0f} ms"
        )
    )
    facts = (
        f"{video.duration_s:.1f} s of video, {video.num_frames} frames at {video.sampled_fps:.3g} per second, "
        f"{context.num_visual_tokens} visual tokens; {how}"
    )
    output.err.print(Text(facts, style="dim"))
