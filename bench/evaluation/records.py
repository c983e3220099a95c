"""One answer's figures, as a line of a file that a stopped run goes on from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[str, str, str, str]  # model, benchmark, item, method


@dataclass(frozen=True)
class Record:
    """Figures of one answer; times in milliseconds. `marks_total` 0: not scored."""

    model: str
    benchmark: str
    item: str
    method: str
    text: str
    num_tokens: int
    num_visual_tokens: int
    num_rounds: int
    num_draft_rounds: int
    num_draft_tokens: int
    accepted_per_pos: list[int]
    num_loose: int
    num_salvaged: int
    decode_ms: float
    ask_ms: float
    context_ms: float
    marks_right: float = 0.0
    marks_total: int = 0
    agreement: float = 1.0
    is_equal_to_plain: bool = True
    draft_mode: str = ""
    details: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What makes the record one of its kind."""
        return self.model, self.benchmark, self.item, self.method

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens."""
        return sum(self.accepted_per_pos)


class RecordFile:
    """Records in a JSONL file: read at the start, appended to as they come. A line cut off by a crash is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = {record.key: record for record in _read(path)}

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def get(self, key: Key) -> Record | None:
        """Returns the record of a key, if it was made."""
        return self._records.get(key)

    def add(self, records: Iterable[Record]) -> None:
        """Keeps records, on disk before they are in memory."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            for record in records:
                file.write(json.dumps(asdict(record)) + "\n")
                self._records[record.key] = record


def _read(path: Path) -> Iterator[Record]:
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        try:
            yield Record(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
