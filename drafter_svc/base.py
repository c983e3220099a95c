"""The seam between the drafter and its kinds: a sequence that proposes tokens, and what drafting it cost."""

from __future__ import annotations

from typing import Protocol

from drafter_svc.drafts import Draft, Round
from engine.scheduler import Steps


class DraftSequence(Protocol):
    """One sequence of one kind. Only the device thread touches it; dropping it frees what it holds."""

    @property
    def num_context_rows(self) -> int:
        """How many rows of the context it reads."""

    def draft(self, asked: Round) -> Steps[Draft]:
        """Proposes tokens after a round's, in steps with other chains; fewer when the sequence ends. Raises KvStale."""
