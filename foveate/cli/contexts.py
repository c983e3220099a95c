"""`foveate contexts`: the videos that a running server holds."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from foveate.cli.errors import reported
from foveate.cli.options import DeadlineOption, JsonOption
from foveate.cli.output import Output, as_dict
from foveate.client import Client
from foveate.client.sync import DEFAULT_ADDRESS

app = typer.Typer(help="Contexts (prefilled videos) of a running server.", no_args_is_help=True)

ServerOption = Annotated[
    str, typer.Option(envvar="FOVEATE_SERVER", metavar="HOST:PORT", help="A running gateway.", show_default=True)
]
NameArgument = Annotated[str, typer.Argument(metavar="CONTEXT", help="contexts/ID, or the ID alone.")]
DEFAULT_CALL_S = 30.0


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
        table = Table("context", "created", "video", "frames", "visual tokens", "KV", box=None)
        for context in contexts:
            video = context.video
            created = context.create_time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
            size = f"{context.kv_bytes / 2**20:.1f} MiB"
            row = (
                context.name,
                created,
                f"{video.duration_s:.1f} s",
                video.num_frames,
                context.num_visual_tokens,
                size,
            )
            table.add_row(*map(str, row))
        output.out.print(table)


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
        table = Table(box=None, show_header=False)
        facts = {**as_dict(context), **as_dict(context.video), **as_dict(context.timings)}
        for key in ("video", "timings", "frame_timestamps_s", "reused"):
            facts.pop(key)
        for key, value in facts.items():
            table.add_row(key, str(value))
        output.out.print(table)


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
