"""Requests and replies over one bidirectional stream, with every failure as an error that names the peer.

Every request has its own id and exactly one reply. A reply with an earlier id is late or doubled and is dropped: taken
for the next draft, it would leave the answer right and its acceptance near zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc

from foveate.rpc.errors import Cancelled, FoveateError, Internal, Unavailable, from_rpc_error

RETRY_AFTER_S = 1.0
VERIFIER_LOST = "VERIFIER_LOST"
END: Any = grpc.aio.EOF  # what reading returns after the last message
_CLOSE_S = 1.0  # how long the end of a stream waits for the peer to free the sequence


@dataclass(frozen=True)
class Deadline:
    """When the caller stops waiting, on the monotonic clock; None is never."""

    at_s: float | None = None

    @classmethod
    def after(cls, remaining_s: float | None) -> Deadline:
        """Returns the deadline `remaining_s` from now."""
        return cls(None if remaining_s is None else time.monotonic() + remaining_s)

    def remaining_s(self) -> float | None:
        """Returns the time left for a call to a peer; never negative."""
        return None if self.at_s is None else max(0.0, self.at_s - time.monotonic())


class _Message(Protocol):
    @property
    def request_id(self) -> int: ...


RequestT = TypeVar("RequestT", bound=_Message)
ReplyT = TypeVar("ReplyT", bound=_Message)


class Exchange(Generic[RequestT, ReplyT]):
    """Requests and replies, one at a time, over one stream. Any failure is a FoveateError that names the peer."""

    def __init__(self, peer: str, call: grpc.aio.StreamStreamCall[RequestT, ReplyT]) -> None:
        self._peer = peer
        self._call = call
        self._last_request_id = 0
        self._is_cancelled = False
        self._is_given_up = False

    def next_id(self) -> int:
        """Returns the id of the next request."""
        self._last_request_id += 1
        return self._last_request_id

    async def ask(self, request: RequestT) -> ReplyT:
        """Sends a request and returns its reply."""
        try:
            with contextlib.suppress(asyncio.InvalidStateError):  # over already: reading tells why
                await self._call.write(request)
            while True:
                reply: Any = await self._call.read()
                if reply is END:
                    raise lost(self._peer, f"the {self._peer} ended the stream")
                if reply.request_id == request.request_id:
                    return cast(ReplyT, reply)
                if reply.request_id > request.request_id:
                    raise self.wrong(f"replied to request {reply.request_id}, which was never sent")
        except grpc.RpcError as error:
            raise peer_error(self._peer, error) from error
        except asyncio.CancelledError:
            if self._is_given_up and not _is_cancelled():
                raise lost(self._peer, f"the {self._peer} does not answer any more") from None
            raise

    def wrong(self, what: str) -> FoveateError:
        """Returns the error of a peer that breaks the contract."""
        return Internal(f"the {self._peer} {what}", reason="PEER_PROTOCOL")

    def cancel(self) -> None:
        """Ends the stream at once; the peer frees the sequence."""
        self._is_cancelled = True
        self._call.cancel()

    def give_up(self) -> None:
        """Ends the stream because the peer has stopped to answer; who waits for a reply hears that it is lost."""
        self._is_given_up = True
        self.cancel()

    async def close(self) -> None:
        """Ends the stream in order, and waits for the peer to have freed the sequence."""
        if self._is_cancelled:  # reading from a stream that was cancelled here raises CancelledError
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._call.done_writing()
                while await self._call.read() is not END:
                    pass
        except (TimeoutError, grpc.RpcError):
            self._call.cancel()


def lost(peer: str, message: str, retry_after_s: float | None = None) -> Unavailable:
    """Returns the error of a call whose peer went away."""
    return Unavailable(message, reason=f"{peer.upper()}_LOST", retry_after_s=retry_after_s or RETRY_AFTER_S)


def peer_error(peer: str, error: grpc.RpcError) -> FoveateError:
    """Returns what a failed call to a peer means for the caller; a peer that went away is UNAVAILABLE, retry soon."""
    mapped = from_rpc_error(error)
    if isinstance(mapped, Unavailable | Cancelled):
        return lost(peer, f"the {peer} is not available", mapped.retry_after_s)
    return mapped


def _is_cancelled() -> bool:
    """Tells whether the task that runs now is being cancelled; a stream that was ended from elsewhere looks alike."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def mapped(peer: str) -> Iterator[None]:
    """Turns a failed call to a peer into its error; a call also fails when it begins after the peer has left."""
    try:
        yield
    except grpc.RpcError as error:
        raise peer_error(peer, error) from error
    except grpc.aio.UsageError as error:  # the channel is being closed: what runs on it ends, nothing new begins
        raise lost(peer, f"the {peer} has left") from error


@contextlib.asynccontextmanager
async def closing(exchange: Exchange[Any, Any]) -> AsyncIterator[None]:
    """Closes the stream in order after a good end, and cancels it at once after any other."""
    try:
        yield
    except BaseException:
        exchange.cancel()
        raise
    await exchange.close()
