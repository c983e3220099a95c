"""A tiny checkpoint of the real classes with random weights: every code path, nothing about quality."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MODELS = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor),
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor),
}


def write_tiny_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    model_type: str = "qwen2_5_vl",
    num_layers: int = 2,
    spread: float = 0.1,
    head_dim: int = 16,
    num_heads: int = 6,
    num_kv_heads: int = 2,
) -> Path:
    """Writes a checkpoint of about 0.2 M random parameters to `folder` and returns it.

    `spread` is the standard deviation of the weights: large enough that greedy answers do not repeat one token.
    """
    config_class, model_class, processor_class = _MODELS[model_type]
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    text = {
        "num_hidden_layers": num_layers,
        "initializer_range": spread,
        "hidden_size": num_heads * head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }
    model = model_class(config_class(**_settings(tokenizer, model_type, text, head_dim)))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.save_pretrained(folder)
    size = {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}
    shared = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    processor_class(
        image_processor=Qwen2VLImageProcessor(**shared),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(
            **shared, min_frames=2, max_frames=4096, cap_pixels_per_frame=False, do_sample_frames=False
        ),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL[1:]),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _settings(
    tokenizer: PreTrainedTokenizerFast, model_type: str, shape: dict[str, object], head_dim: int
) -> dict[str, object]:
    token_id = tokenizer.convert_tokens_to_ids
    sections = [share * head_dim // 16 for share in (2, 3, 3)]
    text = shape | {
        "vocab_size": -(-len(tokenizer) // 16) * 16,
        "intermediate_size": 128,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
        "tie_word_embeddings": True,
    }
    vision = {"depth": 1, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if model_type == "qwen2_5_vl":
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": text["hidden_size"],
            "window_size": 48,
        }
        vision |= {"fullatt_block_indexes": [0], "tokens_per_second": 2}
    else:
        vision |= {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "tie_word_embeddings": True,
    }
