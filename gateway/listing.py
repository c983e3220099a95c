"""The services that register in Redis, as a gateway knows them. It never forgets one because Redis is gone.

listed        it lives
leaving       it said so: forgotten at once
not listed    its lease ran out, or Redis lost what it held: forgotten after `FORGET_S` in which Redis answers and
              never lists it, long enough for every living service to have registered again
no answer     everything stays as it was
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from foveate.store.client import Store
from foveate.store.errors import StoreError
from foveate.store.services import ServiceKind, registered

FORGET_S = 15.0


class RegisteredPeers:
    """The addresses of one kind of services, fleet by fleet."""

    def __init__(self, store: Store, kind: ServiceKind, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._kind = kind
        self._clock = clock
        # Of each fleet, addresses with the moment since when Redis has answered without them; None: it lists them.
        self._known: dict[str, dict[str, float | None]] = {}

    async def __call__(self, fleet: str) -> Sequence[str]:
        """Returns the addresses of a fleet. Never raises."""
        before = self._known.get(fleet, {})
        try:
            listed = await registered(self._store, self._kind, fleet)
        except StoreError:
            self._known[fleet] = dict.fromkeys(before)  # it may come back empty: everybody has all the time again
            return tuple(before)
        now_s = self._clock()
        known: dict[str, float | None] = {record.address: None for record in listed.living}
        for address, missing_since_s in before.items():
            if address in known or address in listed.leaving:
                continue
            since_s = now_s if missing_since_s is None else missing_since_s
            if now_s - since_s < FORGET_S:
                known[address] = since_s
        self._known[fleet] = known
        return tuple(known)
