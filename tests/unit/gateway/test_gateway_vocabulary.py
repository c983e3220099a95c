"""Which tokens guards are about."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gateway.policies import WordKind
from gateway.vocabulary import TokenizerVocabulary

SENTENCE = "There are two red balls and not one blue, isn't it 12 No never maybe 3rd nothing 2½"


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([SENTENCE] * 3, trainer)
    return made


def kinds(tokenizer: tokenizers.Tokenizer, text: str) -> list[WordKind]:
    vocabulary = TokenizerVocabulary(tokenizer, frozenset())
    return [vocabulary.kind_of(token_id) for token_id in tokenizer.encode(text).ids]


def test_words(tokenizer: tokenizers.Tokenizer) -> None:
    for text in (" two", " one", " 12", "12", " 3"):
        assert kinds(tokenizer, text) == [WordKind.NUMBER] * len(kinds(tokenizer, text)), text
    for text in (" not", " No", " never", " nothing", " isn", "'t"):
        assert WordKind.NEGATION in kinds(tokenizer, text), text
    for text in (" red", " balls", ",", " it", " maybe", " There", " ", "e"):
        assert set(kinds(tokenizer, text)) == {WordKind.OTHER}, text


def test_markup_and_what_ends_an_answer(tokenizer: tokenizers.Tokenizer) -> None:
    vocabulary = TokenizerVocabulary(tokenizer, frozenset({40}))
    special = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|pad|>"), 40]
    assert [vocabulary.kind_of(token_id) for token_id in special] == [WordKind.SPECIAL] * 3
    assert vocabulary.text_of(tokenizer.encode(" red").ids[0]) == " red"
