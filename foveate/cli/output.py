"""Where a command writes: the answer or one JSON object to stdout, everything else to stderr."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from enum import IntEnum
from typing import Any

from rich.console import Console

_CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")


class Output:
    """The two streams. Rich leaves out colours and movement where a stream is no terminal, or NO_COLOR says so."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """Writes text of the model or the user to stdout at once, exactly, save for terminal control."""
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def print_table(self, rows: Sequence[Sequence[object]]) -> None:
        """Writes rows to stdout in aligned columns; nothing is cut to the terminal's width, names are to be copied."""
        cells = [[printable(str(cell)) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            self.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")

    def print_json(self, value: dict[str, Any]) -> None:
        """Writes one JSON object as one line to stdout."""
        sys.stdout.write(json.dumps(value, default=_encode, ensure_ascii=False) + "\n")
        sys.stdout.flush()


def printable(text: str) -> str:
    """Returns `text` with control characters shown, not obeyed: a model must not steer the terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def as_dict(value: Any) -> dict[str, Any]:
    """Returns a frozen value of the client as a dict."""
    return dataclasses.asdict(value, dict_factory=_named)


def _named(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Numbers of enumerations mean nothing to a reader; their names do."""
    return {key: value.name.lower() if isinstance(value, IntEnum) else value for key, value in items}


def _encode(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"cannot encode {type(value).__name__}")
