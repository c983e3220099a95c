"""`foveate contexts`: the videos that a running server holds."""

from __future__ import annotations

from typing import Annotated

import typer

from foveate.cli.errors import reported
from foveate.cli.options import DeadlineOption, JsonOption
from foveate.cli.output import Output, as_dict
from foveate.client import Client, Context
from foveate.client.sync import DEFAULT_ADDRESS

app = typer.Typer(help="Contexts (prefilled videos) of a running server.", no_args_is_help=True)

ServerOption = Annotated[
    str, typer.Option(envvar="FOVEATE_SERVER", metavar="HOST:PORT", help="A running gateway.", show_default=True)
]
NameArgument = Annotated[str, typer.Argument(metavar="CONTEXT", help="contexts/ID, or the ID alone.")]
DEFAULT_CALL_S = 30.0
_HEADER = ("context", "created", "video", "frames", "visual tokens", "KV")
_NOT_SHOWN = {"video", "timings", "frame_timestamps_s", "reused"}


@app.command("ls")
def list_contexts(
    server: ServerOption = DEFAULT_ADDRESS, deadline: DeadlineOption = DEFAULT_CALL_S, as_json: JsonOption = False
) -> None:
    """List contexts, newest first."""
    output = Output(as_json=as_json)
    with reported(output), Client(server, timeout_s=deadline or DEFAULT_CALL_S) as client:
        contexts = client.list_contexts()
        if as_json:
            output.print_json({"contexts": [as_dict(context) for context in contexts]})
            return
        output.print_table([_HEADER, *map(_row, contexts)])


@app.command("show")
def show_context(
    name: NameArgument,
    server: ServerOption = DEFAULT_ADDRESS,
    deadline: DeadlineOption = DEFAULT_CALL_S,
    as_json: JsonOption = False,
) -> None:
    """Show one context."""
    output = Output(as_json=as_json)
    with reported(output), Client(server, timeout_s=deadline or DEFAULT_CALL_S) as client:
        context = client.get_context(name)
        if as_json:
            output.print_json(as_dict(context))
            return
        facts = {**as_dict(context), **as_dict(context.video), **as_dict(context.timings)}
        output.print_table([(key, value) for key, value in facts.items() if key not in _NOT_SHOWN])


@app.command("rm")
def remove_contexts(
    names: Annotated[list[str], typer.Argument(metavar="CONTEXT...", help="contexts/ID, or the ID alone.")],
    server: ServerOption = DEFAULT_ADDRESS,
    deadline: DeadlineOption = DEFAULT_CALL_S,
    as_json: JsonOption = False,
) -> None:
    """Free contexts."""
    output = Output(as_json=as_json)
    with reported(output), Client(server, timeout_s=deadline or DEFAULT_CALL_S) as client:
        for name in names:
            client.delete_context(name)
        if as_json:
            output.print_json({"deleted": names})


def _row(context: Context) -> tuple[object, ...]:
    return (
        context.name,
        context.create_time.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        f"{context.video.duration_s:.1f} s",
        context.video.num_frames,
        context.num_visual_tokens,
        f"{context.kv_bytes / 2**20:.1f} MiB",
    )
