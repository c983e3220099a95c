"""Whose request it is: the owner of its API key, the tenant that a trusted proxy names, or the one tenant there is."""

from __future__ import annotations

from typing import Any

import grpc

from foveate.rpc.admission import current_tenant
from foveate.rpc.errors import invalid

MAX_TENANT_LEN = 128


class Tenants:
    """Tells a call's tenant. Tenants share nothing: no context, no conversation, not even that one exists."""

    def __init__(self, header: str) -> None:
        self._header = header

    def of(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """Returns the tenant; empty without keys and header. Raises InvalidArgument when the header is missing."""
        authenticated = current_tenant()
        if authenticated or not self._header:
            return authenticated
        values = [value for key, value in context.invocation_metadata() or () if key == self._header]
        if len(values) != 1 or not isinstance(values[0], str) or not 0 < len(values[0]) <= MAX_TENANT_LEN:
            raise invalid(f"metadata {self._header}", f"must name the tenant, in 1 to {MAX_TENANT_LEN} characters")
        return values[0]
