"""`foveate up`: a local stack in the foreground, with a live line of what it is doing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from foveate.checkpoints import default_checkpoint
from foveate.cli.errors import reported
from foveate.cli.options import (
    DeterministicOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    NoDrafterOption,
    SmallModelOption,
)
from foveate.cli.output import Output
from foveate.cli.session import running_stack
from foveate.client import Client, ServerInfo
from foveate.rpc.errors import FoveateError
from foveate.stack import Stack, StackConfig

_REFRESH_S = 1.0
_MIB = 2**20


def up(
    model: ModelOption = None,
    small_model: SmallModelOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 takes a free one.")] = 8080,
    host: Annotated[
        str, typer.Option(help="Interface of the gateway. There is no authentication: mind whom you let in.")
    ] = "127.0.0.1",
    media_root: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", exists=True, file_okay=False, help="Folder whose videos may be named by path."),
    ] = None,
    pool_mib: Annotated[int | None, typer.Option(min=1, metavar="N", help="KV memory.")] = None,
    device: DeviceOption = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float32|bfloat16|float16|auto", help="Number format of weights and KV; default float32."),
    ] = None,
    deterministic: DeterministicOption = False,
    no_drafter: NoDrafterOption = False,
    redis: Annotated[
        str | None,
        typer.Option(
            envvar="FOVEATE_REDIS",
            metavar="URL",
            help="Redis that keeps contexts and conversations beyond this stack, e.g. redis://127.0.0.1:6379.",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, metavar="N", help="CPU threads of each engine.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Give verifier and drafter CPU cores of their own.")] = False,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the services' logs there when the stack stops.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start verifier, drafter and gateway here, and serve until Ctrl-C."""
    output = Output(as_json=as_json)
    with reported(output):
        config = StackConfig(
            model=model or default_checkpoint(),
            address=f"{host}:{port}",
            media_root=media_root,
            pool_mib=pool_mib,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
            use_drafter=not no_drafter,
            redis_url=redis,
            small_model=small_model,
            pin=pin,
            num_threads=threads,
            log_dir=log_dir,
        )
        serve(config, output)


def serve(config: StackConfig, output: Output) -> None:
    """Runs a stack until it is interrupted, which is its normal end."""
    try:
        with running_stack(config, output) as stack:
            _announce(stack, config, output)
            _watch(stack, output)
    except KeyboardInterrupt:
        output.err.print("stopped")


def _announce(stack: Stack, config: StackConfig, output: Output) -> None:
    addresses = stack.addresses
    if output.as_json:
        facts = {"gateway": addresses.gateway, "verifier": addresses.verifier, "drafter": addresses.drafter}
        output.print_json({**facts, "model": str(config.model), "pid": os.getpid()})
        return
    output.out.print(f"[bold]serving[/] {config.model.name} at {addresses.gateway}")
    output.out.print(f"  export FOVEATE_SERVER={addresses.gateway}")
    output.out.print('  foveate ask video.mp4 "What happens?"')


def _watch(stack: Stack, output: Output) -> None:
    was_drafter_alive = stack.is_drafter_alive
    with (
        Client(stack.addresses.gateway, timeout_s=5.0) as client,
        Live(console=output.err, auto_refresh=False, transient=True) as live,
    ):
        while True:
            stack.check()
            if was_drafter_alive and not stack.is_drafter_alive:
                was_drafter_alive = False
                output.err.print("the drafter is gone; answers go on with n-gram drafts", style="yellow")
            if output.err.is_terminal:
                live.update(Text(status_line(stack, client), no_wrap=True, overflow="ellipsis"), refresh=True)
            time.sleep(_REFRESH_S)


def status_line(stack: Stack, client: Client) -> str:
    """Returns the line of the moment; a service that does not answer in time is said so, never raised."""
    try:
        info, num_contexts, num_sequences = client.server_info(), len(client.list_contexts()), stack.num_sequences()
    except FoveateError as error:
        return f"{stack.addresses.gateway} · not answering: {error.message}"
    return " · ".join((stack.addresses.gateway, *_facts(info), f"{num_contexts} contexts", f"{num_sequences} answers"))


def _facts(info: ServerInfo) -> tuple[str, ...]:
    drafter = f"drafter over {info.kv_transport}" if info.drafter_ready else "no drafter"
    pool = f"KV {info.pool_used_bytes / _MIB:.0f} of {info.pool_bytes / _MIB:.0f} MiB"
    mode = ("deterministic",) if info.deterministic else ()
    return (info.model, info.device, drafter, pool, *mode)
