"""Errors keep everything on their way over the wire and back."""

from __future__ import annotations

import grpc
import pytest
from grpc_status import rpc_status

from foveate.rpc import errors
from foveate.rpc.errors import (
    STATUS_LOST,
    FieldViolation,
    FoveateError,
    InvalidArgument,
    NotFound,
    Unavailable,
    from_rpc_error,
    invalid,
)

KINDS = [
    errors.InvalidArgument,
    errors.NotFound,
    errors.FailedPrecondition,
    errors.Unauthenticated,
    errors.ResourceExhausted,
    errors.DeadlineExceeded,
    errors.Cancelled,
    errors.Unavailable,
    errors.Internal,
]


def over_the_wire(error: FoveateError) -> FoveateError:
    status = rpc_status.to_status(error.to_status())
    metadata = grpc.aio.Metadata(*status.trailing_metadata)
    return from_rpc_error(grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, details=status.details))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_comes_back(kind: type[FoveateError]) -> None:
    error = kind(
        "something",
        reason="SOME_REASON",
        metadata={"needed": "7"},
        violations=(FieldViolation("sampling.top_p", "must be above 0"), FieldViolation("stop", "is long")),
        resource=("context", "contexts/1"),
        retry_after_s=1.25,
    )
    back = over_the_wire(error)
    assert type(back) is kind
    assert back == error


@pytest.mark.parametrize("kind", KINDS)
def test_defaults(kind: type[FoveateError]) -> None:
    back = over_the_wire(kind("something"))
    assert (type(back), back.message, back.reason) == (kind, "something", kind.default_reason)
    assert (back.resource, back.retry_after_s, back.violations) == (None, None, ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_without_details_maps_by_its_code(kind: type[FoveateError]) -> None:
    bare = grpc.aio.AioRpcError(kind.code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="bare")
    back = from_rpc_error(bare)
    assert (type(back), back.message) == (kind, "bare")


def test_a_code_of_nobody_is_internal() -> None:
    bare = grpc.aio.AioRpcError(grpc.StatusCode.DATA_LOSS, grpc.aio.Metadata(), grpc.aio.Metadata())
    back = from_rpc_error(bare)
    assert (type(back), back.message) == (errors.Internal, "DATA_LOSS")


def test_an_error_without_a_code() -> None:
    assert isinstance(from_rpc_error(grpc.RpcError()), errors.Internal)


def test_text_for_people() -> None:
    error = InvalidArgument("wrong", violations=(FieldViolation("a", "must be 1"), FieldViolation("b", "must be 2")))
    assert str(error) == "wrong (a: must be 1; b: must be 2)"
    assert str(NotFound("gone")) == "gone"
    assert str(invalid("stop[0]", "must not be empty").violations[0].field) == "stop[0]"


def test_it_can_be_raised_and_caught_by_the_root() -> None:
    with pytest.raises(FoveateError, match="later") as caught:
        raise Unavailable("later", retry_after_s=0.5)
    assert caught.value.retry_after_s == 0.5


def test_a_connection_that_broke_under_a_call_may_be_tried_again() -> None:
    details = "Stream removed (Unwrap failed (TSI_DATA_CORRUPTED))"
    broken = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    error = from_rpc_error(broken)
    assert isinstance(error, Unavailable)
    assert (error.reason, bool(error.retry_after_s)) == ("CONNECTION_LOST", True)
    other = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata(), details="a bug")
    assert isinstance(from_rpc_error(other), errors.Internal)


def test_a_status_that_was_lost_on_the_way_may_be_asked_for_again() -> None:
    lost = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details="Internal error from Core"
    )
    error = from_rpc_error(lost)
    assert isinstance(error, Unavailable)
    assert (error.reason, bool(error.retry_after_s)) == (STATUS_LOST, True)
