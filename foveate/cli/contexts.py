"""`foveate contexts`: the videos that a running server holds."""

from __future__ import annotations

from typing import Annotated

import typer

from foveate.cli.errors import reported
from foveate.cli.options import DeadlineOption, JsonOption
from foveate.cli.output import Output, as_dict
from foveate.cli.session import open_client
from foveate.client import Context, ContextState
from foveate.client.sync import DEFAULT_ADDRESS

app = typer.Typer(help="Contexts (prefilled videos) of a running server.", no_args_is_help=True)

ServerOption = Annotated[
    str, typer.Option(envvar="FOVEATE_SERVER", metavar="HOST:PORT", help="A running gateway.", show_default=True)
]
NameArgument = Annotated[str, typer.Argument(metavar="CONTEXT", help="contexts/ID, or the ID alone.")]
DEFAULT_CALL_S = 30.0
_HEADER = ("context", "state", "created", "expires", "video", "frames", "visual tokens", "memory", "cold", "hits")
_NOT_SHOWN = {"video", "timings", "frame_timestamps_s", "reused", "fetch", "tiers"}
_MIB = 2**20


@app.command("ls")
def list_contexts(
    state: Annotated[ContextState | None, typer.Option(help="Only those in this state.")] = None,
    media_sha256: Annotated[str, typer.Option("--sha256", metavar="HEX", help="Only those of this video file.")] = "",
    server: ServerOption = DEFAULT_ADDRESS,
    deadline: DeadlineOption = DEFAULT_CALL_S,
    as_json: JsonOption = False,
) -> None:
    """List contexts, newest first."""
    output = Output(as_json=as_json)
    with reported(output), open_client(server, timeout_s=deadline or DEFAULT_CALL_S) as client:
        contexts = client.list_contexts(state=state, media_sha256=media_sha256)
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
    with reported(output), open_client(server, timeout_s=deadline or DEFAULT_CALL_S) as client:
        context = client.get_context(name)
        if as_json:
            output.print_json(as_dict(context))
            return
        facts = {**as_dict(context), **as_dict(context.video), **as_dict(context.timings)}
        facts |= {f"{tier}_bytes": num_bytes for tier, num_bytes in context.tiers.items()}
        if context.fetch is not None:
            facts["came_from"] = f"{context.fetch.source.name.lower()} in {context.fetch.took_ms:.1f} ms"
            for cost in context.fetch.costs:
                facts[f"cost_{cost.source.name.lower()}"] = f"{cost.estimated_ms:.1f} ms"
        output.print_table([(key, value) for key, value in facts.items() if key not in _NOT_SHOWN])


@app.command("pin")
def pin_contexts(
    names: Annotated[list[str], typer.Argument(metavar="CONTEXT...", help="contexts/ID, or the ID alone.")],
    unpin: Annotated[bool, typer.Option("--unpin", help="Let them expire again.")] = False,
    server: ServerOption = DEFAULT_ADDRESS,
    deadline: DeadlineOption = DEFAULT_CALL_S,
    as_json: JsonOption = False,
) -> None:
    """Keep contexts for good: they do not expire and are not evicted."""
    output = Output(as_json=as_json)
    with reported(output), open_client(server, timeout_s=deadline or DEFAULT_CALL_S) as client:
        touched = [client.touch_context(name, pinned=not unpin) for name in names]
        if as_json:
            output.print_json({"contexts": [as_dict(context) for context in touched]})


@app.command("rm")
def remove_contexts(
    names: Annotated[list[str], typer.Argument(metavar="CONTEXT...", help="contexts/ID, or the ID alone.")],
    server: ServerOption = DEFAULT_ADDRESS,
    deadline: DeadlineOption = DEFAULT_CALL_S,
    as_json: JsonOption = False,
) -> None:
    """Free contexts, in memory and in the cold tier."""
    output = Output(as_json=as_json)
    with reported(output), open_client(server, timeout_s=deadline or DEFAULT_CALL_S) as client:
        for name in names:
            client.delete_context(name)
        if as_json:
            output.print_json({"deleted": names})


def _row(context: Context) -> tuple[object, ...]:
    in_pool = context.tiers.get("pool", 0)
    cold = sum(context.tiers.values()) - in_pool
    expires = "" if context.expire_time is None else context.expire_time.astimezone().strftime("%m-%d %H:%M")
    return (
        context.name,
        context.state.value,
        context.create_time.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        "pinned" if context.pinned else expires,
        f"{context.video.duration_s:.1f} s",
        context.video.num_frames,
        context.num_visual_tokens,
        f"{in_pool / _MIB:.1f} MiB",
        f"{cold / _MIB:.1f} MiB",
        context.num_hits,
    )
