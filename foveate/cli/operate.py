"""Commands of whoever runs Foveate: `foveate doctor`, `foveate health`, `foveate new-key`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from foveate.cli.options import JsonOption
from foveate.cli.output import Output, as_dict
from foveate.doctor import Finding, Questions, Verdict, examine, health_of
from foveate.rpc.security import ClientTls, digest_of, new_key
from foveate.store.keys import DEFAULT_FLEET

_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}

CaOption = Annotated[
    Path | None, typer.Option("--ca", envvar="FOVEATE_CA", metavar="FILE", help="PEM CA of the services: TLS.")
]
CertOption = Annotated[Path | None, typer.Option("--cert", metavar="FILE", help="PEM certificate to show (mTLS).")]
KeyOption = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="PEM key of the certificate.")]
NameOption = Annotated[str, typer.Option("--name", metavar="HOST", help="Name in the services' certificates.")]


def doctor(
    pool_mib: Annotated[int, typer.Option(min=1, metavar="N", help="KV pool to find room for.")] = 1024,
    port: Annotated[list[int] | None, typer.Option(help="Port that should be free; repeatable.")] = None,
    redis: Annotated[str, typer.Option(metavar="URL", help="Redis to ask, and who registers there.")] = "",
    fleet: Annotated[str, typer.Option(metavar="NAME", help="Fleet whose services are listed.")] = DEFAULT_FLEET,
    verifier: Annotated[str, typer.Option(metavar="HOST:PORT", help="Verifier to ask.")] = "",
    drafter: Annotated[str, typer.Option(metavar="HOST:PORT", help="Drafter to ask.")] = "",
    gateway: Annotated[str, typer.Option(metavar="HOST:PORT", help="Gateway to ask.")] = "",
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    name: NameOption = "",
    as_json: JsonOption = False,
) -> None:
    """Look whether this machine can run Foveate and whether its services fit together. Exit code 1: something fails."""
    output = Output(as_json=as_json)
    findings = examine(
        Questions(
            pool_mib=pool_mib,
            ports=port or (),
            redis=redis,
            fleet=fleet,
            verifier=verifier,
            drafter=drafter,
            gateway=gateway,
            tls=_tls(ca, cert, key, name),
            alloc_conf=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        )
    )
    if as_json:
        output.print_json({"findings": [as_dict(one) for one in findings]})
    else:
        for one in findings:
            output.out.print(_line(one))
    if any(one.verdict is Verdict.FAIL for one in findings):
        raise typer.Exit(1)


def health(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Gateway, verifier or drafter.")],
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    name: NameOption = "",
    as_json: JsonOption = False,
) -> None:
    """Ask a service for its health. Exit code 0: it serves."""
    output = Output(as_json=as_json)
    status = health_of(address, _tls(ca, cert, key, name))
    if as_json:
        output.print_json({"address": address, "status": status})
    else:
        output.out.print(status)
    if status != "SERVING":
        raise typer.Exit(1)


def make_key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whom the key is for: a-z, 0-9, - and .")],
    as_json: JsonOption = False,
) -> None:
    """Make an API key: the key for the tenant, and the line for the gateway's --api-keys file."""
    output = Output(as_json=as_json)
    key = new_key()
    line = f"{tenant} {digest_of(key)}"
    if as_json:
        output.print_json({"key": key, "line": line})
        return
    output.out.print(key)
    output.err.print(f"add to the file of --api-keys, and keep the key itself nowhere:\n{line}")


def _tls(ca: Path | None, cert: Path | None, key: Path | None, name: str) -> ClientTls | None:
    if ca is None:
        return None
    try:
        return ClientTls(ca, cert, key, name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _line(one: Finding) -> Text:
    text = Text(f"{one.verdict:<5}", style=_COLOURS[one.verdict])
    text.append(f"{one.subject}: {one.found}", style="default")
    if one.remedy and one.verdict is not Verdict.OK:
        text.append(f"\n     → {one.remedy}", style="bold")
    return text
