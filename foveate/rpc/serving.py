"""What every service process is told about serving: TLS, reflection, telemetry. Flags, and the value made of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foveate.rpc.process import FlagParser
from foveate.rpc.security import ClientTls, ServerTls, is_loopback
from foveate.telemetry.setup import NO_TELEMETRY, TelemetryConfig


@dataclass(frozen=True)
class ServingConfig:
    """How a service is served; nothing is encrypted, reflected or recorded by default."""

    tls: ServerTls | None = None
    use_reflection: bool = False
    telemetry: TelemetryConfig = NO_TELEMETRY


def add_serving_flags(parser: FlagParser) -> None:
    """Adds the flags of `serving_config`."""
    parser.flag("tls-cert", Path, None, "PEM certificate chain of this server; with it only TLS is served")
    parser.flag("tls-key", Path, None, "PEM private key of the certificate")
    parser.flag("tls-client-ca", Path, None, "PEM CA of the clients: those without its certificate are refused (mTLS)")
    parser.flag("reflection", _reflection, "auto", "on, off, or auto: on only where a loopback address is served")
    parser.flag("metrics-address", str, "", "host:port of the Prometheus endpoint; port 0 picks a free one")


def serving_config(
    service: str, options: argparse.Namespace, address: str, environment: Mapping[str, str]
) -> ServingConfig:
    """Returns what the flags and the OTEL_* variables say. Raises ValueError when they do not fit together."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together")
    if options.tls_client_ca is not None and options.tls_cert is None:
        raise ValueError("--tls-client-ca needs --tls-cert")
    tls = None if options.tls_cert is None else ServerTls(options.tls_cert, options.tls_key, options.tls_client_ca)
    reflects = is_loopback(address) if options.reflection == "auto" else options.reflection == "on"
    return ServingConfig(tls, reflects, TelemetryConfig.of(service, options.metrics_address, environment))


def add_peer_flags(parser: FlagParser) -> None:
    """Adds the flags of `peer_tls`."""
    parser.flag("peer-ca", Path, None, "PEM CA of the services behind this one; with it they are reached by TLS")
    parser.flag("peer-cert", Path, None, "PEM certificate that is shown to them (mTLS)")
    parser.flag("peer-key", Path, None, "PEM private key of that certificate")
    parser.flag("peer-name", str, "", "name their certificates carry, when it is not the host that is connected to")


def peer_tls(options: argparse.Namespace) -> ClientTls | None:
    """Returns how to reach the services behind this one; None is plaintext. Raises ValueError."""
    if options.peer_ca is None:
        if options.peer_cert is not None or options.peer_key is not None:
            raise ValueError("--peer-cert and --peer-key need --peer-ca")
        return None
    return ClientTls(options.peer_ca, options.peer_cert, options.peer_key, options.peer_name)


def _reflection(text: str) -> str:
    if text not in ("on", "off", "auto"):
        raise argparse.ArgumentTypeError("must be on, off or auto")
    return text
