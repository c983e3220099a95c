"""Where answers end (cases S1, S2, S9), and that it never depends on how an answer was cut into rounds."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from gateway.detokenizer import Detokenizer
from gateway.stops import Output
from gateway.values import Delta, FinishReason, Origin, Token
from tests.fakes import encode, toy_eos, toy_tokenizer


def pieces_tokenizer(*pieces: str) -> tokenizers.Tokenizer:
    """Returns a tokenizer whose token i is exactly `pieces[i]`."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=pieces[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def output(
    tokenizer: tokenizers.Tokenizer,
    *,
    max_tokens: int = 100,
    stop: tuple[str, ...] = (),
    eos: int = -1,
    min_tokens: int = 0,
) -> Output:
    return Output(
        Detokenizer(tokenizer),
        eos_token_ids=frozenset({eos}),
        max_tokens=max_tokens,
        stop=stop,
        min_tokens=min_tokens,
    )


def block(*ids: int) -> list[Token]:
    return [Token(token_id, Origin.ACCEPTED) for token_id in ids]


def test_eos_inside_a_block_ends_the_answer_there() -> None:
    out = output(pieces_tokenizer("a", "b", "c", "<eos>"), eos=3)
    delta = out.commit(block(0, 1, 3, 2))
    assert (delta.text, out.finish_reason) == ("ab", FinishReason.EOS)
    assert [token.id for token in delta.tokens] == [0, 1]
    assert (out.num_committed, out.num_sent) == (3, 2)


def test_stop_string_over_tokens_sends_nothing_of_it() -> None:
    out = output(pieces_tokenizer("ABC", "DEF", "G", "HI", "J", "X"), stop=("DEFGHIJ",))
    sent = [out.commit(block(token_id)).text for token_id in (0, 1, 2, 3)]
    assert sent == ["ABC", "", "", ""]
    last = out.commit(block(4, 5))
    assert (last, out.finish_reason) == (Delta(()), FinishReason.STOP)


def test_stop_string_that_begins_inside_a_token_sends_the_part_before() -> None:
    out = output(pieces_tokenizer("ABCDEF", "G", "HI", "J"), stop=("DEFGHIJ",))
    sent = [out.commit(block(token_id)) for token_id in (0, 1, 2, 3)]
    assert "".join(delta.text for delta in sent) == "ABC"
    assert [token.text for delta in sent for token in delta.tokens] == ["ABC"]
    assert out.finish_reason is FinishReason.STOP


def test_what_did_not_become_a_stop_string_is_released() -> None:
    out = output(pieces_tokenizer("DEF", "G", "X"), stop=("DEFGHIJ",))
    sent = [out.commit(block(token_id)).text for token_id in (0, 1, 2)]
    assert sent == ["", "", "DEFGX"]


@pytest.mark.parametrize("ids", [(0, 1), (0, 1, 3)])
def test_held_text_is_released_when_the_answer_ends(ids: tuple[int, ...]) -> None:
    out = output(
        pieces_tokenizer("DEF", "G", "X", "<eos>"), stop=("DEFGHIJ",), eos=3, max_tokens=2 if 3 not in ids else 9
    )
    assert out.commit(block(*ids)).text == "DEFG"
    assert out.finish_reason is (FinishReason.EOS if 3 in ids else FinishReason.LENGTH)


def test_the_first_stop_string_that_completes_wins() -> None:
    out = output(pieces_tokenizer("a", "bcde", "f"), stop=("bcdef", "cd"))
    assert out.commit(block(0, 1, 2)).text == "ab"


def test_length_ends_after_max_tokens() -> None:
    out = output(pieces_tokenizer("a", "b"), max_tokens=3)
    assert out.remaining == 3
    assert out.commit(block(0, 1)).text == "ab"
    assert out.remaining == 1
    assert out.commit(block(0, 1, 0)).text == "a"
    assert (out.finish_reason, out.remaining) == (FinishReason.LENGTH, 0)


def test_a_stop_string_in_the_last_token_is_a_stop() -> None:
    out = output(pieces_tokenizer("a", "b"), max_tokens=2, stop=("b",))
    assert out.commit(block(0, 1)).text == "a"
    assert out.finish_reason is FinishReason.STOP


def test_a_truncated_character_is_flushed_with_its_token() -> None:
    ids = encode("ok 🦑")[:-1]
    out = output(toy_tokenizer(), max_tokens=len(ids))
    deltas = [out.commit(block(token_id)) for token_id in ids]
    assert "".join(delta.text for delta in deltas) == "ok \ufffd"
    assert not any("\ufffd" in delta.text for delta in deltas[:-1])
    assert [token.id for delta in deltas for token in delta.tokens] == list(ids)


def run(
    ids: list[int], cuts: list[int], stop: tuple[str, ...], max_tokens: int
) -> tuple[str, list[int], object, list[Delta]]:
    out = output(toy_tokenizer(), stop=stop, max_tokens=max_tokens, eos=toy_eos())
    deltas: list[Delta] = []
    start = 0
    for length in [*cuts, len(ids)]:
        if out.finish_reason is None and ids[start : start + length]:
            deltas.append(out.commit(block(*ids[start : start + length])))
        start += length
    text = "".join(delta.text for delta in deltas)
    return text, [token.id for delta in deltas for token in delta.tokens], out.finish_reason, deltas


fragments = st.sampled_from(["the red ", "square", " 🙂", "北京", "naïve", "abcabd", "ab", "\n"])


@given(
    st.lists(fragments, max_size=8).map("".join),
    st.lists(st.integers(1, 6), max_size=30),
    st.lists(st.sampled_from(["ed s", "🙂", "京n", "abd", "\n", "abcabdab"]), max_size=3, unique=True).map(tuple),
    st.integers(1, 60),
)
def test_rounds_do_not_change_the_answer(text: str, cuts: list[int], stop: tuple[str, ...], max_tokens: int) -> None:
    ids = [*encode(text), toy_eos()]
    one_by_one = run(ids, [1] * len(ids), stop, max_tokens)
    in_blocks = run(ids, cuts, stop, max_tokens)
    assert one_by_one[:3] == in_blocks[:3]
    assert not any(one in in_blocks[0] for one in stop)
    assert text.startswith(in_blocks[0].rstrip("\ufffd"))
    for delta in in_blocks[3][:-1]:
        assert "\ufffd" not in delta.text


@given(
    st.lists(st.integers(2, toy_tokenizer().get_vocab_size() - 1), max_size=30),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_any_tokens_come_out_as_they_are(ids: list[int], cuts: list[int]) -> None:
    text, sent_ids, reason, _ = run(ids, cuts, (), 1000)
    assert sent_ids == ids[: len(sent_ids)]
    assert toy_tokenizer().decode(ids).startswith(text)
    assert reason is None


@pytest.mark.parametrize("block_len", [1, 3, 8])
@pytest.mark.parametrize(
    ("min_tokens", "text", "reason"),
    [
        (0, "", FinishReason.STOP),
        (2, "ab", FinishReason.STOP),  # the first "ab" is complete within two tokens, the second is not
        (4, "ababcab", FinishReason.EOS),
        (3, "ab", FinishReason.STOP),
    ],
)
def test_a_stop_string_within_min_tokens_is_text(
    min_tokens: int, text: str, reason: FinishReason, block_len: int
) -> None:
    out = output(pieces_tokenizer("a", "b", "c", "ab", "<eos>"), stop=("ab",), eos=4, min_tokens=min_tokens)
    ids = (0, 1, 0, 1, 2, 0, 1, 4) if min_tokens != 4 else (0, 1, 0, 1, 2, 4)
    sent = ""
    for start in range(0, len(ids), block_len):
        if out.finish_reason is None:
            sent += out.commit(block(*ids[start : start + block_len])).text
    assert (sent, out.finish_reason) == (text if min_tokens != 4 else "ababc", reason)


def test_a_stop_string_that_begins_within_min_tokens_and_ends_behind_ends_the_answer() -> None:
    out = output(pieces_tokenizer("x", "a", "b"), stop=("ab", "never"), min_tokens=2)
    assert [out.commit(block(token_id)).text for token_id in (0, 1, 2)] == ["x", "", ""]
    assert out.finish_reason is FinishReason.STOP


def test_an_end_of_answer_within_min_tokens_is_a_token_without_an_end() -> None:
    # A loose policy without guards may keep one that was drafted.
    out = output(pieces_tokenizer("a", "<eos>"), eos=1, min_tokens=2)
    out.commit(block(1, 0))
    assert out.finish_reason is None
    out.commit(block(1))
    assert (out.finish_reason, out.num_sent) == (FinishReason.EOS, 2)
