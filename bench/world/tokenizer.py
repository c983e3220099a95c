"""The tokenizer that every tiny model shares, and the chat template of the Qwen families."""

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.world.facts import FACT_WORDS
from bench.world.model import SPECIAL_TOKENS, VOCAB_SIZE
from bench.world.questions import ASKERS
from bench.world.scenes import Plan, sample_world
from bench.world.splits import TRAIN
from bench.world.wording import CAPTION_QUESTIONS, DESCRIBE_QUESTIONS

TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")
NUM_TOKENIZER_WORLDS = 2500
WORD_REPEATS = 50  # so that each fact word is one token, with and without a space before it
SYSTEM_PROMPT = "You are a helpful assistant."
# words of everyday questions that no answer uses yet: whole tokens rather than bytes for a user who asks freely
SPARE_WORDS = (
    "when where who why was were has had not but or if then than also before after while during first "
    "second third last next later earlier between both same different other another start end middle "
    "beginning time seconds frame frames scene scenes cut appears disappears turns becomes color colors "
    "shape shapes sizes motion direction bigger smaller faster slower many much long short visible hidden "
    "top bottom side center near far"
)
# Qwen's split of text into words, and its chat template without image history
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}\
{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}\
{% set image_count.value = image_count.value + 1 %}\
{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif content['type'] == 'video' or 'video' in content %}\
{% set video_count.value = video_count.value + 1 %}\
{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of all tiny models, from the file that `train_tokenizer` once made.

    It is kept as a file because a change of wording must not give the tokens of a trained model other numbers.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(TOKENIZER_FILE)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=131072,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE over the world's language; any other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _corpus() -> Iterator[str]:
    rng = random.Random(1)
    for seed in TRAIN[:NUM_TOKENIZER_WORLDS]:
        world = sample_world(seed, Plan(16, max_things=6))
        for ask in ASKERS.values():
            sample = ask(rng, world)
            yield sample.question
            yield sample.answer
        yield f"system\n{SYSTEM_PROMPT}"
        yield "user\n"
        yield "assistant\n"
    yield from CAPTION_QUESTIONS
    yield from DESCRIBE_QUESTIONS
    for word in [*sorted(FACT_WORDS), *SPARE_WORDS.split()]:
        yield from [word, f" {word}"] * WORD_REPEATS
