"""Every key in Redis. What belongs to one context has its id as hash tag, so that a cluster keeps it on one node."""

from __future__ import annotations

import hashlib

PREFIX = "foveate"
DEFAULT_FLEET = "default"  # services that register without a fleet of their own
# Cold copies, as members "id/form/generation/num_bytes/num_chunks", scored by last use (server clock, s).
COLD_INDEX = f"{PREFIX}:cold"


def record(context_id: str) -> str:
    """The context's record, for everybody to find."""
    return f"{PREFIX}:{{{context_id}}}:record"


def holders(context_id: str) -> str:
    """A hash: pool id -> fencing token of the flight that put the context there."""
    return f"{PREFIX}:{{{context_id}}}:holders"


def flight(context_id: str) -> str:
    """The lease of whoever is making the context now."""
    return f"{PREFIX}:{{{context_id}}}:flight"


def token(context_id: str) -> str:
    """The counter of fencing tokens."""
    return f"{PREFIX}:{{{context_id}}}:token"


def manifest(context_id: str, form: str) -> str:
    """The manifest of a cold copy."""
    return f"{PREFIX}:{{{context_id}}}:{form}:manifest"


def chunk(context_id: str, form: str, generation: int, index: int) -> str:
    """A chunk of a cold copy; a writer's generation keeps its chunks apart from every other writer's."""
    return f"{PREFIX}:{{{context_id}}}:{form}:{generation}:{index}"


def alive(pool_id: str) -> str:
    """A verifier's heartbeat: while it is there, what its pool holds counts."""
    return f"{PREFIX}:alive:{pool_id}"


def index(tenant: str) -> str:
    """A sorted set of a tenant's context ids by creation time in ns."""
    return f"{PREFIX}:index:{_tag(tenant)}"


def conversation(tenant: str, conversation_id: str) -> str:
    """A conversation's record."""
    return f"{PREFIX}:conversation:{_tag(tenant)}:{conversation_id}"


def leases(kind: str, fleet: str) -> str:
    """A sorted set: addresses of a fleet's services of a kind, scored by when their lease ends (server clock, ms)."""
    return f"{PREFIX}:{{services:{fleet}:{kind}}}:leases"


def services(kind: str, fleet: str) -> str:
    """A hash: address -> the service's record; empty for one that is leaving."""
    return f"{PREFIX}:{{services:{fleet}:{kind}}}:records"


def _tag(tenant: str) -> str:
    # A tenant's name may have any characters, also those that would make two keys read the same.
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]
