"""What can go wrong with the store; none of it ends a request by itself."""

from __future__ import annotations


class StoreError(Exception):
    """The store did not do what was asked."""


class Unreachable(StoreError):
    """No answer in time, a broken connection, or a breaker that is open; what the store holds is unknown."""


class Full(StoreError):
    """The store has no room (maxmemory) or takes no writes."""


class Corrupt(StoreError):
    """A record, chunk or reply that is not what was written: damaged, truncated, foreign, of another kind."""


class Missing(StoreError):
    """Something that another record promises is not there: evicted, deleted, half-written."""
