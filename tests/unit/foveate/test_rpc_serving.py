"""How a service is served: what flags and variables say, TLS on both sides, and who may call."""

from __future__ import annotations

import argparse
import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foveate.rpc.channel import open_channel
from foveate.rpc.errors import Unauthenticated
from foveate.rpc.process import FlagParser
from foveate.rpc.security import ApiKeys, ClientTls, ServerTls, digest_of, is_loopback, new_key
from foveate.rpc.server import Server, running
from foveate.rpc.serving import ServingConfig, add_peer_flags, add_serving_flags, peer_tls, serving_config
from foveate.telemetry.setup import TelemetryConfig


def parsed(
    arguments: list[str], address: str = "127.0.0.1:0", environment: dict[str, str] | None = None
) -> tuple[ServingConfig, argparse.Namespace]:
    parser = FlagParser("service", "A service.", environment or {})
    add_serving_flags(parser)
    add_peer_flags(parser)
    options = parser.parse_args(arguments)
    return serving_config("gateway", options, address, environment or {}), options


@pytest.mark.parametrize(
    ("address", "arguments", "reflects"),
    [
        ("127.0.0.1:0", [], True),
        ("[::1]:0", [], True),
        ("unix:/tmp/socket", [], True),
        ("0.0.0.0:8080", [], False),
        ("[::]:8080", [], False),
        ("10.0.0.1:8080", ["--reflection", "on"], True),
        ("127.0.0.1:0", ["--reflection", "off"], False),
    ],
)
def test_reflection_is_for_the_loopback_unless_asked_for(address: str, arguments: list[str], reflects: bool) -> None:
    assert parsed(arguments, address)[0].use_reflection is reflects
    assert is_loopback(address) is (address[0] in "1[u" and not address.startswith(("[::]", "10.")))


@pytest.mark.parametrize(
    ("environment", "sends"),
    [
        ({}, (False, False)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, (True, True)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, (True, False)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, (False, True)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "true"}, (False, False)),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, (False, True)),
    ],
)
def test_the_standard_variables_say_what_is_sent(environment: dict[str, str], sends: tuple[bool, bool]) -> None:
    config = TelemetryConfig.of("gateway", "", environment)
    assert (config.sends_traces, config.sends_metrics) == sends
    assert config.is_on is any(sends)
    assert config.service == "foveate-gateway"


@pytest.mark.parametrize(
    "arguments", [["--tls-cert", "c"], ["--tls-key", "k"], ["--tls-client-ca", "a"], ["--peer-cert", "c"]]
)
def test_halves_of_settings_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="--"):
        peer_tls(parsed(arguments)[1])


@dataclass(frozen=True)
class Pki:
    """A CA, a server of it and a client of it, as PEM files."""

    ca: Path
    cert: Path
    key: Path


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1", "verifier.foveate")
    made = Pki(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.cert_pem.write_to_path(str(made.ca))
    made.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(made.key))
    return made


async def check(port: int, tls: ClientTls | None) -> grpc.StatusCode:
    async with open_channel(f"127.0.0.1:{port}", tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.fixture
async def mutual(pki: Pki) -> AsyncIterator[int]:
    server = Server([], address="127.0.0.1:0", tls=ServerTls(pki.cert, pki.key, client_ca=pki.ca))
    async with running(server, grace_s=0):
        yield server.port


async def test_mutual_tls_lets_in_who_has_a_certificate_and_nobody_else(mutual: int, pki: Pki, tmp_path: Path) -> None:
    other = trustme.CA()
    stranger = other.issue_cert("client")
    stranger.private_key_pem.write_to_path(str(tmp_path / "k.pem"))
    (tmp_path / "c.pem").write_bytes(stranger.cert_chain_pems[0].bytes())
    assert await check(mutual, ClientTls(pki.ca, pki.cert, pki.key)) is grpc.StatusCode.OK
    for refused in (None, ClientTls(pki.ca), ClientTls(pki.ca, tmp_path / "c.pem", tmp_path / "k.pem"), ClientTls()):
        assert await check(mutual, refused) is grpc.StatusCode.UNAVAILABLE


async def test_a_servers_name_is_checked(mutual: int, pki: Pki) -> None:
    named = ClientTls(pki.ca, pki.cert, pki.key, server_name="verifier.foveate")
    assert await check(mutual, named) is grpc.StatusCode.OK
    other = ClientTls(pki.ca, pki.cert, pki.key, server_name="drafter.foveate")
    assert await check(mutual, other) is grpc.StatusCode.UNAVAILABLE


async def test_tls_without_a_certificate_of_clients_speaks_to_any(pki: Pki) -> None:
    server = Server([], address="127.0.0.1:0", tls=ServerTls(pki.cert, pki.key))
    async with running(server, grace_s=0):
        assert await check(server.port, ClientTls(pki.ca)) is grpc.StatusCode.OK
        context = ssl.create_default_context(cafile=str(pki.ca))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        writer.close()
        assert not reader.at_eof()


async def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere\.pem"):
        Server([], address="127.0.0.1:0", tls=ServerTls(tmp_path / "nowhere.pem", tmp_path / "nowhere.pem"))


def test_keys_name_tenants_and_are_not_kept(tmp_path: Path) -> None:
    key, other = new_key(), new_key()
    path = tmp_path / "keys"
    path.write_text(f"# comment\n\nacme {digest_of(key)}  # old\nacme.eu {digest_of(other)}\n")
    keys = ApiKeys.load(path)
    assert keys.tenant_of({"authorization": f"Bearer {key}"}) == "acme"
    assert keys.tenant_of({"authorization": f"bearer {other}"}) == "acme.eu"
    assert keys.tenant_of({"x-api-key": other}) == "acme.eu"
    assert key not in repr(vars(keys))
    bad: list[dict[str, Any]] = [
        {},
        {"authorization": key},
        {"authorization": f"Basic {key}"},
        {"authorization": "Bearer "},
        {"x-api-key": key[:-1]},
        {"x-api-key": digest_of(key)},
    ]
    for metadata in bad:
        with pytest.raises(Unauthenticated):
            keys.tenant_of(metadata)


@pytest.mark.parametrize("line", ["acme", "acme notahash", "ac me " + "a" * 64, "UPPER " + "a" * 64, "# nothing"])
def test_a_wrong_key_file_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(ValueError, match="keys"):
        ApiKeys.load(path)
