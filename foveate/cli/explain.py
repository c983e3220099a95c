"""`foveate explain`: an answer that was asked for with --json --explain, shown again, on the screen or as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from foveate.cli.answer_view import LEGEND, STYLES
from foveate.cli.errors import reported
from foveate.cli.output import Output, printable
from foveate.explanation import ExplainedToken, Explanation, from_json
from foveate.explanation_html import page
from foveate.rpc.errors import InvalidArgument, NotFound, invalid

_HEAT = " ▁▂▃▄▅▆▇█"


def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="What `foveate ask ... --json --explain` printed.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page instead: heat strip, rounds, loose tokens.")
    ] = None,
) -> None:
    """Show where each token of an answer came from, and what looseness did."""
    output = Output(as_json=False)
    with reported(output):
        told = from_json(_read(file))
        if html is None:
            show(output, told)
        else:
            write_page(output, told, html)


def write_page(output: Output, told: Explanation, path: Path) -> None:
    """Writes the page and says where. Raises InvalidArgument when it cannot be written."""
    try:
        path.write_text(page(told))
    except OSError as error:
        raise invalid("html", f"{path} cannot be written: {error.strerror}") from error
    output.err.print(f"wrote {path}", style="dim", markup=False)


def show(output: Output, told: Explanation) -> None:
    """Writes the answer with its tokens marked, the strip of relevance, and what was kept loosely."""
    output.out.print(Text(printable(told.question), style="bold"))
    for token in told.tokens:
        output.out.print(Text(printable(token.text), style=STYLES[token.origin]), end="")
    output.out.print()
    if (spread := told.relevance_range) is not None:
        output.out.print(Text(f"relevance {spread[0]:.3f} to {spread[1]:.3f}: {_strip(told)}", style="dim"))
    parts = [
        Text(f"{told.counts[origin]} {LEGEND[origin]}", style=style)
        for origin, style in STYLES.items()
        if told.counts[origin]
    ]
    output.out.print(Text(" · ", style="dim").join(parts))
    loose = [(place, token) for place, token in enumerate(told.tokens) if token.is_loose]
    if loose:
        output.out.print(_loose_table(loose))


def _strip(told: Explanation) -> str:
    """A bar a token, the taller the more relevant."""
    assert told.relevance_range is not None
    low, high = told.relevance_range
    bars = []
    for token in told.tokens:
        share = 0.0 if token.relevance is None or high == low else (token.relevance - low) / (high - low)
        bars.append(_HEAT[round(share * (len(_HEAT) - 1))])
    return "".join(bars)


def _loose_table(loose: list[tuple[int, ExplainedToken]]) -> Table:
    table = Table("token", "kept", "the verifier's choice", "how", "relevance", box=None)
    for place, token in loose:
        relevance = "" if token.relevance is None else f"{token.relevance:.3f}"
        cells = (str(place), printable(token.text), printable(token.target_text), token.origin.value, relevance)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _read(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise NotFound(f"no file {file}", resource=("file", str(file))) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise invalid("file", f"{file} is no JSON file that can be read") from error
    if not isinstance(content, dict):
        raise InvalidArgument("the file holds no JSON object")
    return content
