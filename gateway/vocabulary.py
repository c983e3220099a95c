"""The words behind token ids, as far as guards care: markup, numbers, negations."""

from __future__ import annotations

import functools
import re

import tokenizers

from gateway.policies import WordKind


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMBER_WORDS = _words(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion first
    second third fourth fifth sixth seventh eighth ninth tenth once twice half dozen"""
)
_NEGATIONS = _words(
    """no not never none nobody nothing nowhere neither nor without cannot n't 't isn aren wasn weren don doesn didn
    won wouldn couldn shouldn hasn haven hadn"""
)
_EDGES = re.compile(r"^[\W_]+|[\W_]+$")


class TokenizerVocabulary:
    """Looks tokens up in a tokenizer; a word is judged when it is first asked for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = eos_token_ids | frozenset(tokenizer.get_added_tokens_decoder())
        self.kind_of = functools.cache(self._kind_of)

    def text_of(self, token_id: int) -> str:
        """Returns the text of a token on its own; half a character is a replacement character."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _kind_of(self, token_id: int) -> WordKind:
        if token_id in self._special_ids:
            return WordKind.SPECIAL
        text = self.text_of(token_id).strip().lower()
        word = text if text in _NEGATIONS else _EDGES.sub("", text)
        if any(character.isnumeric() for character in text) or word in _NUMBER_WORDS:
            return WordKind.NUMBER
        return WordKind.NEGATION if word in _NEGATIONS else WordKind.OTHER
