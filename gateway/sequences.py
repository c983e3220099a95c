"""What rounds need of a verifier: open a sequence, verify rounds on it. One verifier does, and so do several."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gateway.exchange import Deadline
from gateway.values import Draft, Head, OpenedSequence, Question, Verified


class OpenSequence(Protocol):
    """A sequence that is open."""

    @property
    def opened(self) -> OpenedSequence:
        """How it was opened."""

    async def verify(self, head: Head, draft: Draft) -> Verified:
        """Returns the target's choices for a round."""


class SequenceOpener(Protocol):
    """Whoever can open a sequence for a question."""

    def open_sequence(self, question: Question, deadline: Deadline) -> AbstractAsyncContextManager[OpenSequence]:
        """Prefills the question on its context; the sequence lives as long as the block."""
