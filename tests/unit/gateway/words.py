"""Vocabularies for tests of policies."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.policies import WordKind


@dataclass(frozen=True)
class PlainWords:
    """A vocabulary of which only some tokens are anything special."""

    kinds: dict[int, WordKind] = field(default_factory=dict)

    def kind_of(self, token_id: int) -> WordKind:
        return self.kinds.get(token_id, WordKind.OTHER)
