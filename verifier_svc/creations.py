"""Creations by request id: a broken-off upload can be resumed, a request sent twice is one, progress can be watched.

running    its progress is on a board that anybody of the tenant may watch
broken off what has arrived of its upload is kept for a while; the same request goes on from there
done       the context's name is kept for a while; the same request gets it without an upload
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from foveate.rpc.errors import FailedPrecondition, NotFound, invalid
from verifier_svc.media import UploadSpool
from verifier_svc.progress import Progress, ProgressBoard

_KEEP_S = 600.0
_MAX_CREATIONS = 4096
_MAX_SPOOLS = 16  # broken-off uploads; each is at most as large as an upload may be


@dataclass
class Creation:
    """One request: what it asked for, how far it is, what came of it."""

    description: bytes
    board: ProgressBoard | None = None  # while it runs
    spool: UploadSpool | None = None  # after it broke off
    context_id: str | None = None  # after it was done
    used_s: float = field(default_factory=time.monotonic)


class Creations:
    """Creations of all tenants by (tenant, request id). Used on the event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], Creation] = OrderedDict()

    def begin(self, tenant: str, request_id: str, description: bytes) -> Creation:
        """Returns a request's creation, new or known, which runs from now on; `ended` must follow.

        Raises InvalidArgument when the id was used for another request, FailedPrecondition while it runs already.
        """
        self._forget_old()
        key = (tenant, request_id)
        creation = self._known.get(key)
        if creation is None:
            creation = self._known[key] = Creation(description)
        if creation.description != description:
            raise invalid("spec.request_id", "was used for another request")
        if creation.board is not None:
            raise FailedPrecondition("the same request is running already; watch it instead", reason="REQUEST_RUNNING")
        creation.board = ProgressBoard()
        self._known.move_to_end(key)
        return creation

    def ended(self, creation: Creation, *, context_id: str | None = None, spool: UploadSpool | None = None) -> None:
        """Ends a run: with a context, or with what has arrived so far, or with neither."""
        if creation.board is not None:
            creation.board.close()
        creation.board, creation.spool = None, spool
        creation.context_id = context_id or creation.context_id
        creation.used_s = self._clock()
        self._bound_spools()

    def watch(self, tenant: str, request_id: str, *, min_interval_s: float) -> AsyncIterator[Progress] | None:
        """Returns the progress of a request that runs; None when it does not run any more. Raises NotFound."""
        creation = self._find(tenant, request_id)
        return None if creation.board is None else creation.board.watch(min_interval_s=min_interval_s)

    def result(self, tenant: str, request_id: str) -> str:
        """Returns the context id of a request that is done. Raises NotFound when nothing came of it."""
        creation = self._find(tenant, request_id)
        if creation.context_id is None:
            raise NotFound(f"request {request_id} has made no context", resource=("request", request_id))
        return creation.context_id

    def close(self) -> None:
        """Drops what has arrived of every upload."""
        for creation in self._known.values():
            _drop(creation)

    def _find(self, tenant: str, request_id: str) -> Creation:
        creation = self._known.get((tenant, request_id))
        if creation is None:
            raise NotFound(f"no request {request_id} is known here", resource=("request", request_id))
        return creation

    def _forget_old(self) -> None:
        limit_s = self._clock() - _KEEP_S
        old = [key for key, one in self._known.items() if one.board is None and one.used_s < limit_s]
        spare = len(self._known) - len(old) - _MAX_CREATIONS + 1
        old += [key for key, one in self._known.items() if one.board is None and key not in old][: max(0, spare)]
        for key in old:
            _drop(self._known.pop(key))

    def _bound_spools(self) -> None:
        waiting = sorted((one for one in self._known.values() if one.spool is not None), key=lambda one: one.used_s)
        for creation in waiting[: max(0, len(waiting) - _MAX_SPOOLS)]:
            _drop(creation)


def _drop(creation: Creation) -> None:
    if creation.spool is not None:
        creation.spool.discard()
        creation.spool = None
