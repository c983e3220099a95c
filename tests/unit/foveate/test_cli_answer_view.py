"""Colours by origin follow the text, also where it lags behind its tokens."""

from __future__ import annotations

from foveate.cli.answer_view import STYLES, OriginColours
from foveate.cli.output import printable
from foveate.client import Delta, Origin

A, R = Origin.ACCEPTED, Origin.RECOVERED


def spans(colours: OriginColours, delta: Delta) -> list[tuple[str, str]]:
    text = colours.take(delta)
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_text_is_split_where_tokens_end() -> None:
    delta = Delta("red ball", (1, 2), (A, R), ("red ", "ball"))
    assert spans(OriginColours(), delta) == [("red ", STYLES[A]), ("ball", STYLES[R])]


def test_text_that_was_held_back_keeps_its_token() -> None:
    colours = OriginColours()
    assert spans(colours, Delta("AB", (1, 2), (A, R), ("ABC", "DE"))) == [("AB", STYLES[A])]
    assert spans(colours, Delta("CDE", ())) == [("C", STYLES[A]), ("DE", STYLES[R])]


def test_text_without_tokens_is_shown_all_the_same() -> None:
    assert OriginColours().take(Delta("tail", ())).plain == "tail"


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\nd\té\U0001f600") == "a�[2Jb��c\nd\té\U0001f600"
