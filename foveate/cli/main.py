"""The `foveate` command."""

from __future__ import annotations

from typing import Annotated

import typer

import foveate
from foveate.cli import contexts
from foveate.cli.ask import ask, describe
from foveate.cli.chat import chat
from foveate.cli.errors import EXIT_CODES_HELP, reported
from foveate.cli.explain import explain
from foveate.cli.operate import CaOption, doctor, health, make_key
from foveate.cli.options import JsonOption
from foveate.cli.output import Output, as_dict
from foveate.cli.session import Credentials, open_client, use_credentials
from foveate.cli.up import up
from foveate.rpc.security import ClientTls

app = typer.Typer(
    name="foveate",
    help="Ask questions about videos.",
    epilog=EXIT_CODES_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def credentials(
    api_key: Annotated[
        str | None, typer.Option(envvar="FOVEATE_API_KEY", metavar="KEY", help="Key for a gateway that asks for one.")
    ] = None,
    ca: CaOption = None,
) -> None:
    """Take what every command that asks a server needs."""
    use_credentials(Credentials(api_key, None if ca is None else ClientTls(ca)))


app.command()(up)
app.command()(ask)
app.command()(chat)
app.command()(describe)
app.command()(explain)
app.command()(doctor)
app.command()(health)
app.command("new-key")(make_key)
app.add_typer(contexts.app, name="contexts")


@app.command()
def version(
    server: Annotated[
        str | None, typer.Option(envvar="FOVEATE_SERVER", metavar="HOST:PORT", help="Also ask this gateway.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the version, and a server's."""
    output = Output(as_json=as_json)
    with reported(output):
        info = None
        if server is not None:
            with open_client(server, timeout_s=10.0) as client:
                info = client.server_info()
        if as_json:
            output.print_json({"version": foveate.__version__, "server": None if info is None else as_dict(info)})
            return
        output.out.print(f"foveate {foveate.__version__}")
        if info is not None:
            output.out.print(f"server {info.version}: {info.model} on {info.device}, KV over {info.kv_transport}")


if __name__ == "__main__":
    app()
