"""An answer token by token: where each came from and what was known of it, from what `ask --json --explain` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from foveate.client import Origin
from foveate.rpc.errors import InvalidArgument, invalid

LOOSE = (Origin.LOOSE, Origin.SALVAGED)


@dataclass(frozen=True)
class ExplainedToken:
    """One token. `target_text` is what the verifier would have said, where it is another; `draft_text` was rejected."""

    text: str
    origin: Origin
    round: int
    relevance: float | None = None
    entropy: float | None = None
    log_probability: float | None = None
    target_text: str = ""
    draft_text: str = ""

    @property
    def is_loose(self) -> bool:
        """Whether the verifier chose another token here."""
        return self.origin in LOOSE


@dataclass(frozen=True)
class Explanation:
    """A whole answer."""

    question: str
    tokens: tuple[ExplainedToken, ...]
    guarantee: str
    policy: str
    draft_mode: str
    accepted_per_round: float | None

    @property
    def rounds(self) -> Iterator[tuple[int, tuple[ExplainedToken, ...]]]:
        """The tokens of each round, in order; round 0 is the first token."""
        for number, tokens in groupby(self.tokens, key=lambda token: token.round):
            yield number, tuple(tokens)

    @property
    def counts(self) -> Counter[Origin]:
        """How many tokens came from where."""
        return Counter(token.origin for token in self.tokens)

    @property
    def relevance_range(self) -> tuple[float, float] | None:
        """The smallest and the largest relevance; None when it was not measured."""
        scores = [token.relevance for token in self.tokens if token.relevance is not None]
        return (min(scores), max(scores)) if scores else None


def from_json(answer: Mapping[str, Any]) -> Explanation:
    """Reads the object that `foveate ask --json --explain` prints. Raises InvalidArgument when it is something else."""
    try:
        texts, origins, details = answer["token_texts"], answer["origins"], answer["details"]
        stats = answer["stats"]
        if not texts or not len(texts) == len(origins) == len(details):
            raise invalid("file", "holds an answer without explanation: ask with --json and --explain")
        return Explanation(
            question=str(answer["question"]),
            tokens=_tokens(texts, origins, details),
            guarantee=str(answer["guarantee"]),
            policy=str(answer["policy"]),
            draft_mode=str(stats["draft_mode"]),
            accepted_per_round=answer.get("accepted_per_round"),
        )
    except InvalidArgument:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise invalid("file", "is not what `foveate ask --json --explain` prints") from error


def _tokens(
    texts: Sequence[str], origins: Sequence[str], details: Sequence[Mapping[str, Any]]
) -> tuple[ExplainedToken, ...]:
    return tuple(
        ExplainedToken(
            text=str(text),
            origin=Origin(origin),
            round=int(detail["round"]),
            relevance=_number(detail["relevance"]),
            entropy=_number(detail["entropy"]),
            log_probability=_number(detail["log_probability"]),
            target_text=str(detail["target_text"]),
            draft_text=str(detail["draft_text"]),
        )
        for text, origin, detail in zip(texts, origins, details, strict=True)
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
