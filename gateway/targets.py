"""How settings name peers.

HOST:PORT       one peer, for ever
dns:HOST:PORT   one peer for each address of the name, looked up again and again: a headless Service of Kubernetes
redis:[FLEET]   the peers that register in Redis under the fleet's name (--register, --fleet of the services)
"""

from __future__ import annotations

from foveate.store.keys import DEFAULT_FLEET

DNS = "dns:"
REDIS = "redis:"


def fleet_of(target: str) -> str:
    """Returns the fleet that a `redis:` target names."""
    return target.removeprefix(REDIS) or DEFAULT_FLEET
