import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLProcessor

from bench.world import held_out
from bench.world.facts import FACT_WORDS
from bench.world.model import TOKEN_ID, VOCAB_SIZE
from bench.world.positions import Grid, prompt_positions
from bench.world.processor import build_processor
from bench.world.train.branches import IGNORED, BranchPacker

PROCESSOR = build_processor()


@pytest.fixture
def processor() -> Qwen2_5_VLProcessor:
    return PROCESSOR


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = PROCESSOR.tokenizer(text)["input_ids"]
    assert PROCESSOR.tokenizer.decode(ids) == text


def test_special_tokens_have_the_ids_that_the_model_is_configured_with(processor: Qwen2_5_VLProcessor) -> None:
    assert {token: processor.tokenizer.convert_tokens_to_ids(token) for token in TOKEN_ID} == TOKEN_ID
    assert len(processor.tokenizer) <= VOCAB_SIZE


def test_a_fact_word_is_one_token(processor: Qwen2_5_VLProcessor) -> None:
    for word in FACT_WORDS:
        assert [len(processor.tokenizer(form)["input_ids"]) for form in (word, f" {word}")] == [1, 1]


def test_a_training_row_is_the_chat_templates_prompt(processor: Qwen2_5_VLProcessor) -> None:
    sample = held_out("describe", 3, num_frame_pairs=5)
    content = [{"type": "video"}, {"type": "text", "text": sample.question}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    expected = torch.tensor(processor.tokenizer(prompt.replace("<|video_pad|>", "<|video_pad|>" * 45))["input_ids"])
    packer = BranchPacker(processor.tokenizer)
    rows = packer.rows([[packer.branch([sample])]], num_pairs=5, interval=1)
    assert rows.input_ids[0, : len(expected)].tolist() == expected.tolist()
    positions = prompt_positions(expected, TOKEN_ID["<|video_pad|>"], Grid(5, 6, 6, 0.5))
    assert rows.positions[:, 0, : len(expected)].tolist() == positions.tolist()
    targets = rows.targets[0][rows.targets[0] != IGNORED]
    assert processor.tokenizer.decode(targets) == sample.answer + "<|im_end|>"


def test_a_second_turn_is_the_chat_templates(processor: Qwen2_5_VLProcessor) -> None:
    first, second = held_out("question", 1, num_frame_pairs=2), held_out("describe", 1, num_frame_pairs=2)
    packer = BranchPacker(processor.tokenizer)
    branch = packer.branch([first, second])
    messages = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": first.question}]},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": second.question},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    after_video = text.split("<|vision_end|>")[1] + second.answer + "<|im_end|>"
    assert branch.token_ids == processor.tokenizer(after_video)["input_ids"]


def test_branches_see_the_prefix_and_themselves_only(processor: Qwen2_5_VLProcessor) -> None:
    packer = BranchPacker(processor.tokenizer)
    samples = [held_out("question", index, num_frame_pairs=2) for index in range(2)]
    first, second = (packer.branch([sample]) for sample in samples)
    rows = packer.rows([[first, second]], num_pairs=2, interval=1)
    prefix = rows.input_ids.shape[1] - len(first.token_ids) - len(second.token_ids)
    last = rows.mask[0, 0, -1]
    assert last[:prefix].all()
    assert not last[prefix : prefix + len(first.token_ids)].any()
    assert last[prefix + len(first.token_ids) :].all()
    starts = rows.positions[:, 0, [prefix, prefix + len(first.token_ids)]]
    assert len(set(starts.flatten().tolist())) == 1
