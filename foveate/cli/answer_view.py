"""An answer on the screen: streamed text, tokens coloured by origin, the line of statistics."""

from __future__ import annotations

from collections import Counter, deque

from rich.text import Text

from foveate.cli.errors import cancelled_by_signals
from foveate.cli.output import Output, as_dict, printable
from foveate.client import Answer, AnswerStream, Context, Delta, Guarantee, Origin

STYLES = {
    Origin.ACCEPTED: "green",
    Origin.RECOVERED: "yellow",
    Origin.BONUS: "cyan",
    Origin.PLAIN: "magenta",
    Origin.LOOSE: "bold red",
    Origin.SALVAGED: "bold bright_blue",
}
LEGEND = {
    Origin.ACCEPTED: "accepted draft",
    Origin.RECOVERED: "verifier, for a rejected draft",
    Origin.BONUS: "verifier, after a full draft",
    Origin.PLAIN: "verifier, no draft",
    Origin.LOOSE: "loose draft",
    Origin.SALVAGED: "draft salvaged by position",
}

_MAX_LOOSE_LINES = 10


def show_stream(output: Output, stream: AnswerStream, *, explain: bool) -> Answer:
    """Writes an answer while it streams and returns it; with --json nothing is written."""
    colours = OriginColours()
    with stream, cancelled_by_signals(stream.cancel):
        if explain and not output.as_json:
            print_legend(output)
        for delta in stream:
            if output.as_json:
                continue
            if explain:
                output.out.print(colours.take(delta), end="")
            else:
                output.write(delta.text)
        answer = stream.result
    if not output.as_json:
        output.write("\n")
    return answer


class OriginColours:
    """Pairs text with the tokens it came from; text may lag behind them (half characters, possible stop strings)."""

    def __init__(self) -> None:
        self._pending: deque[tuple[str, Origin]] = deque()

    def take(self, delta: Delta) -> Text:
        """Returns the delta's text, every character styled by the origin of its token."""
        self._pending.extend(zip(delta.token_texts, delta.origins, strict=True))
        styled = Text()
        rest = delta.text
        while rest:
            text, origin = self._pending.popleft() if self._pending else (rest, Origin.PLAIN)
            if len(text) > len(rest):
                self._pending.appendleft((text[len(rest) :], origin))
            styled.append(printable(rest[: len(text)]), style=STYLES[origin])
            rest = rest[len(text) :]
        return styled


def print_legend(output: Output) -> None:
    """Says what the colours mean."""
    parts = [Text(LEGEND[origin], style=style) for origin, style in STYLES.items()]
    output.err.print(Text(" · ", style="dim").join(parts))


def print_statistics(output: Output, answer: Answer) -> None:
    """Prints the line at the end of an answer, and its notes."""
    output.err.print(Text(" · ".join(statistics(answer)), style="dim"))
    if answer.origins:
        counts = Counter(answer.origins)
        parts = [Text(f"{counts[origin]} {LEGEND[origin]}", style=style) for origin, style in STYLES.items()]
        output.err.print(Text(" · ", style="dim").join(parts))
    if answer.logprobs:
        _print_logprobs(output, answer)
    for line in loose_lines(answer):
        output.err.print(Text(printable(line), style="red"))
    for note in answer.notes:
        output.err.print(Text(f"note: {note}", style="yellow"))


def _print_logprobs(output: Output, answer: Answer) -> None:
    """Prints a line a token: its id and log-probability, and the likeliest tokens at its place."""
    for token_id, told in zip(answer.token_ids, answer.logprobs, strict=True):
        likeliest = "  ".join(f"{top.text!r} {top.logprob:.3f}" for top in told.top)
        output.err.print(Text(printable(f"{token_id:>7} {told.logprob:8.3f}  {likeliest}".rstrip()), style="dim"))


def loose_lines(answer: Answer) -> list[str]:
    """Returns what an explained answer kept against the verifier's choice, a line each, the first ten."""
    lines = []
    for place in answer.loose_positions[:_MAX_LOOSE_LINES]:
        detail, kept = answer.details[place], answer.token_texts[place]
        seen = "" if detail.relevance is None else f", relevance {detail.relevance:.2f}"
        lines.append(f"{answer.origins[place].value}: {kept!r}, the verifier chose {detail.target_text!r}{seen}")
    left = len(answer.loose_positions) - len(lines)
    return lines if not left else [*lines, f"and {left} more; foveate explain shows all"]


def statistics(answer: Answer) -> list[str]:
    """Returns the parts of the statistics line."""
    stats = answer.stats
    speed, accepted = answer.tokens_per_s, stats.accepted_per_round
    guarantee = answer.guarantee.value
    if answer.guarantee is Guarantee.LOOSE:
        guarantee += f" ({stats.num_loose_tokens} tokens)"
    return [
        counted(answer.num_output_tokens, "token"),
        *([f"{speed:.1f} tokens/s"] if speed is not None else []),
        counted(stats.num_rounds, "round"),
        *([f"{accepted:.2f} accepted per round"] if accepted is not None else ["no drafts"]),
        f"drafts: {stats.draft_mode.value if stats.draft_mode else 'unknown'}",
        f"first token {stats.time_to_first_token_ms:.0f} ms",
        f"prompt {answer.num_prompt_tokens} tokens, {answer.num_cached_tokens} cached",
        f"ended by {answer.finish_reason.value}",
        guarantee,
        *([f"seed {answer.seed}"] if answer.seed is not None else []),
    ]


def counted(number: int, noun: str) -> str:
    """Returns "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def answer_json(context: Context, answer: Answer) -> dict[str, object]:
    """Returns the JSON object of an answer: the answer's and the statistics' fields, the context as an object."""
    accepted = answer.stats.accepted_per_round
    return {
        **as_dict(answer),
        "context": as_dict(context),
        "accepted_per_round": accepted,
        "tokens_per_s": answer.tokens_per_s,
    }
