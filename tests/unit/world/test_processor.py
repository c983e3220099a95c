import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from bench.world import held_out
from bench.world.draw import draw
from bench.world.facts import FACT_WORDS
from bench.world.families import FAMILIES, WorldFamily
from bench.world.model import TOKEN_ID, VOCAB_SIZE
from bench.world.tokenizer import build_tokenizer
from bench.world.train.branches import IGNORED, BranchPacker

TOKENIZER = build_tokenizer()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return TOKENIZER


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_have_the_ids_that_the_model_is_configured_with(tokenizer: PreTrainedTokenizerFast) -> None:
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in TOKEN_ID} == TOKEN_ID
    assert len(tokenizer) <= VOCAB_SIZE


def test_a_fact_word_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in FACT_WORDS:
        assert [len(tokenizer(form)["input_ids"]) for form in (word, f" {word}")] == [1, 1]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_training_row_is_the_processors_prompt(family: WorldFamily) -> None:
    sample = held_out("describe", 3, num_frame_pairs=5)
    processor = family.build_processor()
    frames = torch.from_numpy(draw(sample.world)[:: family.frame_stride]).permute(0, 3, 1, 2)
    content = [{"type": "video"}, {"type": "text", "text": sample.question}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    metadata = {"fps": 4.0, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
    settings = {"video_metadata": [metadata], "do_sample_frames": False}
    inputs = processor(text=[prompt], videos=[frames], videos_kwargs=settings, return_tensors="pt")
    expected = inputs["input_ids"][0]
    packer = BranchPacker(processor.tokenizer, family)
    rows = packer.rows([[packer.branch([sample])]], num_pairs=5, interval=1)
    assert rows.input_ids[0, : len(expected)].tolist() == expected.tolist()
    positions = family.prompt_positions(expected, num_steps=5, second_per_step=0.5)
    assert rows.positions[:, 0, : len(expected)].tolist() == positions.tolist()
    targets = rows.targets[0][rows.targets[0] != IGNORED]
    assert processor.tokenizer.decode(targets) == sample.answer + "<|im_end|>"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_second_turn_is_the_chat_templates(family: WorldFamily) -> None:
    first, second = held_out("question", 1, num_frame_pairs=2), held_out("describe", 1, num_frame_pairs=2)
    processor = family.build_processor()
    branch = BranchPacker(processor.tokenizer, family).branch([first, second])
    messages = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": first.question}]},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": second.question},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    asked = text.split("<|video_pad|>" + family.chat.after_video)[1]
    assert branch.token_ids == processor.tokenizer(asked + second.answer + "<|im_end|>")["input_ids"]


def test_branches_see_the_prefix_and_themselves_only(tokenizer: PreTrainedTokenizerFast) -> None:
    packer = BranchPacker(tokenizer, FAMILIES["qwen2_5_vl"])
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
