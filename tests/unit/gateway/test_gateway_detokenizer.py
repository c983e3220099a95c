"""Incremental decoding of a byte-level tokenizer, where most characters outside ASCII take several tokens (case S3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer
from tests.fakes import EOS_TEXT, encode, toy_eos, toy_tokenizer

any_token = st.integers(0, toy_tokenizer().get_vocab_size() - 1)


def pieces(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(toy_tokenizer())
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_text_comes_back_whole_and_without_replacement_characters(text: str) -> None:
    got = pieces(list(encode(text)))
    assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


@given(st.lists(any_token, max_size=40))
def test_any_tokens_give_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == toy_tokenizer().decode(ids, skip_special_tokens=True)


@given(st.lists(st.sampled_from(encode("naïve 🙂🚀 北京の猫 👩‍🚀")), max_size=30))
def test_fragments_of_characters_in_any_order(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == toy_tokenizer().decode(ids, skip_special_tokens=True)


def test_nothing_of_a_character_comes_before_its_last_byte() -> None:
    ids = list(encode("🦑"))
    assert len(ids) >= 3
    assert pieces(ids) == [*[""] * (len(ids) - 1), "🦑", ""]


def test_a_character_that_never_ends_is_flushed_once() -> None:
    detokenizer = Detokenizer(toy_tokenizer())
    for token_id in encode("a🦑")[:-1]:
        detokenizer.push(token_id)
    assert not detokenizer.is_whole
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.is_whole
    assert detokenizer.flush() == ""


def test_special_tokens_add_no_text() -> None:
    assert pieces([*encode("ab"), toy_eos(), *encode("cd")])[-1] == ""
    assert "".join(pieces([*encode("ab"), toy_eos(), *encode("cd")])) == "abcd"


@pytest.mark.parametrize("text", [EOS_TEXT, "plain", ""])
def test_is_whole_after_whole_characters(text: str) -> None:
    detokenizer = Detokenizer(toy_tokenizer())
    for token_id in encode(text):
        detokenizer.push(token_id)
    assert detokenizer.is_whole
