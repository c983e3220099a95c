"""Errors that cross the wire: one tree, one table, rich details in the trailers.

FoveateError
├── InvalidArgument      INVALID_ARGUMENT     the caller must change the request (BadRequest field violations)
├── NotFound             NOT_FOUND            name the resource again or create it (ResourceInfo)
├── FailedPrecondition   FAILED_PRECONDITION  the state does not allow it; retrying the same call will not help
├── Unauthenticated      UNAUTHENTICATED      the call's API key is missing or unknown
├── ResourceExhausted    RESOURCE_EXHAUSTED   a limit was reached; with retry_after_s (RetryInfo) it may pass
├── DeadlineExceeded     DEADLINE_EXCEEDED    the caller's deadline passed
├── Cancelled            CANCELLED            the caller went away
├── Unavailable          UNAVAILABLE          safe to retry after retry_after_s (RetryInfo)
└── Internal             INTERNAL             our bug; the text of the exception is logged, never sent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "foveate"

# How gRPC says that a connection ended under a call, when TLS found a changed byte for example; as if nobody knew why.
_BROKEN_STREAM = "Stream removed"
_RECONNECT_S = 0.1
# What grpc.aio makes of a call whose peer ended it while a message was being written here: the peer's status is lost.
_LOST_STATUS = "Internal error from Core"

# The reason of an error that stands for a status that was lost; asked again, the peer says it again.
STATUS_LOST = "STATUS_LOST"

# Where google.rpc.Status travels (gRPC's own convention, the same in every language).
_STATUS_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class FieldViolation:
    """One thing wrong with a request: the path of the field, as in `sampling.temperature`, and what it must be."""

    field: str
    description: str


@dataclass
class FoveateError(Exception):
    """An error with everything a caller needs to react.

    `reason` is UPPER_SNAKE and stable: programs match on it. `message` is for people. `metadata` names the values
    involved, such as the need and the limit.
    """

    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: Sequence[FieldViolation] = ()
    resource: tuple[str, str] | None = None
    retry_after_s: float | None = None

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.reason = self.reason or self.default_reason

    def __str__(self) -> str:
        details = "; ".join(f"{violation.field}: {violation.description}" for violation in self.violations)
        return f"{self.message} ({details})" if details else self.message

    def to_status(self) -> status_pb2.Status:
        """Returns google.rpc.Status with ErrorInfo and whatever details the error has."""
        details: list[Message] = [
            error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=dict(self.metadata))
        ]
        if self.violations:
            violations = [
                error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=violation.description)
                for violation in self.violations
            ]
            details.append(error_details_pb2.BadRequest(field_violations=violations))
        if self.resource is not None:
            kind, name = self.resource
            details.append(error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name))
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        packed = [_pack(detail) for detail in details]
        return status_pb2.Status(code=self.code.value[0], message=self.message, details=packed)


class InvalidArgument(FoveateError):
    """The request is wrong; build with `violations`."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"


class NotFound(FoveateError):
    """The named thing is not there; build with `resource`."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class FailedPrecondition(FoveateError):
    """The state does not allow the call."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class Unauthenticated(FoveateError):
    """Who calls is not known."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class ResourceExhausted(FoveateError):
    """A limit was reached; `metadata` names need and limit."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(FoveateError):
    """The caller's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(FoveateError):
    """The caller went away."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class Unavailable(FoveateError):
    """Nobody can serve this now; retrying is safe."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class Internal(FoveateError):
    """A bug of ours."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


_BY_CODE: dict[grpc.StatusCode, type[FoveateError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        FailedPrecondition,
        Unauthenticated,
        ResourceExhausted,
        DeadlineExceeded,
        Cancelled,
        Unavailable,
        Internal,
    )
}


_BY_NUMBER = {code.value[0]: kind for code, kind in _BY_CODE.items()}


def invalid(field_path: str, description: str) -> InvalidArgument:
    """Returns the error of one wrong field."""
    return InvalidArgument(f"{field_path}: {description}", violations=(FieldViolation(field_path, description),))


def from_rpc_error(error: grpc.RpcError) -> FoveateError:
    """Returns the error a peer raised, with its details; a peer without details still maps to the right class."""
    status = _status_of(error)
    if status is not None:
        return from_status(status)
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    message = (error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None) or code.name
    if code is grpc.StatusCode.UNKNOWN and message.startswith(_BROKEN_STREAM):
        return Unavailable("the connection broke", reason="CONNECTION_LOST", retry_after_s=_RECONNECT_S)
    if code is grpc.StatusCode.INTERNAL and message == _LOST_STATUS:
        return Unavailable("the call ended, and why was lost", reason=STATUS_LOST, retry_after_s=_RECONNECT_S)
    return _BY_CODE.get(code, Internal)(message)


def from_status(status: status_pb2.Status) -> FoveateError:
    """Returns the error that `to_status` was called on; an unknown code is Internal."""
    kind = _BY_NUMBER.get(status.code, Internal)
    info, bad, resource, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.ResourceInfo(),
        error_details_pb2.RetryInfo(),
    )
    parts: tuple[Message, ...] = (info, bad, resource, retry)
    found = {type(part).__name__ for part in parts for detail in status.details if detail.Unpack(part)}
    return kind(
        status.message,
        reason=info.reason,
        metadata=dict(info.metadata),
        violations=tuple(FieldViolation(one.field, one.description) for one in bad.field_violations),
        resource=(resource.resource_type, resource.resource_name) if "ResourceInfo" in found else None,
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if "RetryInfo" in found else None,
    )


def _status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    trailers = error.trailing_metadata() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    for key, value in trailers or ():
        if key == _STATUS_DETAILS_KEY:
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
            return None if status.code == code_pb2.OK else status
    return None


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
