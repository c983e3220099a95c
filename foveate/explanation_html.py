"""An explained answer as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator

from foveate.client import Origin
from foveate.explanation import ExplainedToken, Explanation

LEGEND = {
    Origin.ACCEPTED: "draft that the verifier would have said too",
    Origin.LOOSE: "draft kept against the verifier's choice",
    Origin.SALVAGED: "draft kept: right, but shifted by some places",
    Origin.RECOVERED: "verifier's word in place of a rejected draft",
    Origin.BONUS: "verifier's word after a draft kept whole",
    Origin.PLAIN: "verifier's word without a draft",
}
_STYLE = """
body { font: 16px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.answer { font-size: 1.15rem; line-height: 2.1; white-space: pre-wrap; }
.answer span, .legend span { padding: .1em 0; border-bottom: 3px solid; border-radius: 2px; }
.accepted { border-color: #4a9e5c; } .recovered { border-color: #d1a300; } .bonus { border-color: #1d9aa8; }
.plain { border-color: #a66bbe; } .loose { border-color: #d43a2f; background: #fde3e0; }
.salvaged { border-color: #2f6bd4; background: #e0eafd; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .85rem; }
.strip { display: flex; height: 2.2rem; border: 1px solid #bbb; } .strip div { flex: 1; }
.strip .mark { border-top: 4px solid #d43a2f; box-sizing: border-box; }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .15rem .7rem; text-align: left; }
tr:nth-child(even) td { background: #f4f4f4; } .number { text-align: right; font-variant-numeric: tabular-nums; }
small { color: #666; }
"""


def page(explanation: Explanation) -> str:
    """Returns the page."""
    return "".join(_parts(explanation))


def _parts(told: Explanation) -> Iterator[str]:
    yield "<!doctype html><html lang=en><head><meta charset=utf-8><title>Foveate: an answer explained</title>"
    yield f"<style>{_STYLE}</style></head><body>"
    yield f"<h1>{_text(told.question)}</h1><p><small>{_text(_facts(told))}</small></p>"
    yield '<p class="answer">' + "".join(_span(token) for token in told.tokens) + "</p>"
    yield '<p class="legend">' + "".join(_entry(told, origin) for origin in LEGEND) + "</p>"
    yield from _strip(told)
    yield from _loose_table(told)
    yield from _rounds(told)
    yield "</body></html>\n"


def _facts(told: Explanation) -> str:
    accepted = "" if told.accepted_per_round is None else f", {told.accepted_per_round:.2f} draft tokens kept a round"
    loose = sum(token.is_loose for token in told.tokens)
    number = f", {loose} of {len(told.tokens)} tokens against the verifier's choice" if loose else ""
    return f"policy {told.policy}, {told.draft_mode} drafts{accepted}; {told.guarantee}{number}"


def _span(token: ExplainedToken) -> str:
    return f'<span class="{token.origin.value}" title="{_text(_title(token))}">{_text(token.text)}</span>'


def _title(token: ExplainedToken) -> str:
    parts = [f"round {token.round}: {LEGEND[token.origin]}"]
    if token.target_text:
        parts.append(f"the verifier would have said {token.target_text!r}")
    if token.draft_text:
        parts.append(f"the draft said {token.draft_text!r}")
    if token.relevance is not None:
        parts.append(f"relevance {token.relevance:.3f}")
    if token.entropy is not None:
        parts.append(f"entropy {token.entropy:.2f} nats")
    if token.log_probability is not None:
        parts.append(f"probability {math.exp(token.log_probability):.3f}")
    return "; ".join(parts)


def _entry(told: Explanation, origin: Origin) -> str:
    return f'<span class="{origin.value}">{told.counts[origin]} {_text(LEGEND[origin])}</span>'


def _strip(told: Explanation) -> Iterator[str]:
    """A bar a token: the darker, the more its place looks at the video; a red edge where the answer is loose."""
    spread = told.relevance_range
    if spread is None:
        return
    low, high = spread
    yield f"<h2>Relevance to the video</h2><p><small>from {low:.3f} (light) to {high:.3f} (dark)</small></p>"
    yield '<div class="strip">'
    for token in told.tokens:
        share = 0.0 if token.relevance is None or high == low else (token.relevance - low) / (high - low)
        colour = f"hsl(210 70% {96 - 66 * share:.0f}%)"
        mark = ' class="mark"' if token.is_loose else ""
        yield f'<div{mark} style="background: {colour}" title="{_text(token.text)}: {_text(_title(token))}"></div>'
    yield "</div>"


def _loose_table(told: Explanation) -> Iterator[str]:
    loose = [(place, token) for place, token in enumerate(told.tokens) if token.is_loose]
    if not loose:
        return
    yield "<h2>What looseness did</h2><table><tr><th>token<th>kept<th>the verifier would have said<th>why"
    yield "<th>relevance<th>probability</tr>"
    for place, token in loose:
        why = "shifted" if token.origin is Origin.SALVAGED else "does not look at the video, or the target is unsure"
        relevance = "" if token.relevance is None else f"{token.relevance:.3f}"
        likely = "" if token.log_probability is None else f"{math.exp(token.log_probability):.3f}"
        yield f'<tr><td class="number">{place}<td>{_text(token.text)}<td>{_text(token.target_text)}<td>{why}'
        yield f'<td class="number">{relevance}<td class="number">{likely}</tr>'
    yield "</table>"


def _rounds(told: Explanation) -> Iterator[str]:
    yield "<h2>Rounds</h2><table><tr><th>round<th>drafts kept<th>tokens</tr>"
    for number, tokens in told.rounds:
        kept = sum(token.origin in (Origin.ACCEPTED, Origin.LOOSE, Origin.SALVAGED) for token in tokens)
        spans = "".join(map(_span, tokens))
        yield f'<tr><td class="number">{number}<td class="number">{kept}<td class="answer">{spans}</tr>'
    yield "</table>"


def _text(value: str) -> str:
    return html.escape(value, quote=True)
