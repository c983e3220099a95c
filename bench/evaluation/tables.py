"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.evaluation.summary import Summary

COLUMNS = (
    "method",
    "items",
    "T (95 % interval)",
    "mean acceptance length",
    "rounds",
    "loose / salvaged",
    "decode speed-up",
    "end-to-end",
    "facts",
    "of the target's own (95 %)",
    "agreement",
    "same text",
)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def summary_table(summaries: Iterable[Summary]) -> str:
    """Returns a table with a row per method."""
    return markdown_table(COLUMNS, map(_row, summaries))


def _row(one: Summary) -> tuple[object, ...]:
    low, high = one.accepted_interval
    lowest, highest = one.fidelity_interval
    return (
        one.method,
        one.num_items,
        f"{one.accepted_per_round:.2f} ({low:.2f} to {high:.2f})",
        f"{one.accepted_per_round + 1:.2f}",
        f"{one.rounds:.1f}",
        f"{one.loose_share:.1%} / {one.salvaged_share:.1%}",
        f"{one.decode_speedup:.2f}",
        f"{one.end_to_end_speedup:.2f}",
        f"{one.facts:.3f}",
        f"{one.fidelity:.3f} ({lowest:.3f} to {highest:.3f})",
        f"{one.agreement:.3f}",
        f"{one.equal_share:.0%}",
    )
