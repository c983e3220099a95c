"""From gRPC's errors to ours, with a clear word when the server cannot be reached."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc

from foveate.client.upload import ContextSource
from foveate.rpc.errors import FoveateError, Unavailable, from_rpc_error


@contextlib.contextmanager
def reached(address: str, source: ContextSource | None = None) -> Iterator[None]:
    """Raises FoveateError for a call's grpc.RpcError; what broke `source` goes before the CANCELLED it causes."""
    try:
        yield
    except grpc.RpcError as error:
        if source is not None and source.error is not None:
            raise source.error from None
        raise _translated(error, address) from None


def _translated(error: grpc.RpcError, address: str) -> FoveateError:
    found = from_rpc_error(error)
    # Only gRPC itself reports UNAVAILABLE without our details: nobody answered, or the connection broke.
    if isinstance(found, Unavailable) and found.reason == Unavailable.default_reason and not found.metadata:
        if "failed to connect" in found.message.lower() or "dns resolution" in found.message.lower():
            hint = "is the gateway running? (foveate up)"
            return Unavailable(f"no server answers at {address}; {hint}", reason="UNREACHABLE")
        if "Socket closed" in found.message or "Connection reset" in found.message:
            return Unavailable(f"the connection to {address} broke", reason="CONNECTION_LOST")
    return found
