"""From gRPC's errors to ours, with a clear word when the server cannot be reached."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc

from foveate.client.upload import ContextSource
from foveate.rpc.errors import STATUS_LOST, FoveateError, Unavailable, from_rpc_error


@contextlib.contextmanager
def reached(address: str, source: ContextSource | None = None) -> Iterator[None]:
    """Raises FoveateError for a call's grpc.RpcError; what broke `source` goes before the CANCELLED it causes."""
    try:
        yield
    except grpc.RpcError as error:
        if source is not None and source.error is not None:
            raise source.error from None
        raise _translated(error, address) from None


RESUMES = 5  # times that an upload goes on after its connection broke
_BROKEN = {
    "CONNECTION_LOST",
    "UNAVAILABLE",
    "VERIFIER_LOST",
    "NO_VERIFIER",
    "CANCELLED",
    "REQUEST_RUNNING",
    STATUS_LOST,
}


def resume_after_s(error: FoveateError, source: ContextSource, num_resumes: int) -> float | None:
    """Returns how long to wait before an upload goes on; None when it must not, or has too often."""
    is_broken = error.reason in _BROKEN or (num_resumes > 0 and error.reason == "UNREACHABLE")
    if not source.can_resume or source.error is not None or not is_broken or num_resumes >= RESUMES:
        return None
    return 0.2 * 2.0**num_resumes


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
