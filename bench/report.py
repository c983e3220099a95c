"""What every bench prints: a readable table, what the machine was doing, and one JSON object as the last line."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

_console = Console(width=120, highlight=False)


def say(text: str) -> None:
    """Prints a line of progress or explanation."""
    _console.print(text)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table; the first column is a label, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    _console.print(table)


def print_json(values: Mapping[str, Any]) -> None:
    """Prints the machine-readable result; call it last."""
    print(json.dumps(values), flush=True)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error (0 for fewer than two values)."""
    if len(values) < 2:
        return (values[0] if values else math.nan), 0.0
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


class CoreLoad:
    """Measures how busy each core was between two moments, other processes included."""

    def __init__(self) -> None:
        psutil.cpu_percent(percpu=True)

    def percent_per_core(self) -> list[float]:
        """Returns the busy share of every core since the start or the last call, in percent."""
        return psutil.cpu_percent(percpu=True)
