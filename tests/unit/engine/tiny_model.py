"""Tiny checkpoints of the real classes with random weights: every code path, nothing about quality."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
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
# LLaVA-OneVision's own, with other names for the placeholders: no system prompt, and content only as lists.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<|image_pad|>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<|video_pad|>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\\n' + content['text'] }}"
    "{% endfor %}{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "llava_onevision", "qwen3_vl")
_LLAVA_FRAME = 44  # of which whole patches fill 40, as 378 of 384 in the real one

Settings = dict[str, Any]


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
    is_tied: bool = True,
    vocab_multiple: int = 16,
    max_shard_size: str = "50GB",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a checkpoint of about 0.2 M random parameters to `folder` and returns it.

    `spread` is the standard deviation of the weights: large enough that greedy answers do not repeat one token. The
    vocabulary is padded to a multiple; weights go to several files when `max_shard_size` is small.
    """
    parts = _PARTS[model_type]
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    shape = {
        "num_hidden_layers": num_layers,
        "initializer_range": spread,
        "hidden_size": num_heads * head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": -(-len(tokenizer) // vocab_multiple) * vocab_multiple,
        "tie_word_embeddings": is_tied,
    }
    text = _text(tokenizer, shape) | parts.text(head_dim)
    settings = {"text_config": text, "vision_config": parts.vision(text), "tie_word_embeddings": is_tied}
    model = parts.model(parts.config(**settings, **parts.token_ids(tokenizer)))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    parts.processor(tokenizer).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class _Parts:
    """How a family's checkpoint is built."""

    config: Any
    model: Any
    text: Callable[[int], Settings]
    vision: Callable[[Settings], Settings]
    token_ids: Callable[[PreTrainedTokenizerFast], Settings]
    processor: Callable[[PreTrainedTokenizerFast], Any]


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


def _text(tokenizer: PreTrainedTokenizerFast, shape: Settings) -> Settings:
    token_id = tokenizer.convert_tokens_to_ids
    return shape | {
        "intermediate_size": 128,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
    }


def _rope(head_dim: int, **more: object) -> Settings:
    sections = [share * head_dim // 16 for share in (2, 3, 3)]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}
    return {"rope_parameters": rope}


def _llava_text(head_dim: int) -> Settings:
    return {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def _qwen3_text(head_dim: int) -> Settings:
    return {"head_dim": head_dim, **_rope(head_dim, mrope_interleaved=True)}


def _qwen_vision(text: Settings) -> Settings:
    return {"depth": 1, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}


def _qwen2_vision(text: Settings) -> Settings:
    return _qwen_vision(text) | {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2}


def _qwen25_vision(text: Settings) -> Settings:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": text["hidden_size"], "window_size": 48}
    return _qwen_vision(text) | sizes | {"fullatt_block_indexes": [0], "tokens_per_second": 2}


def _qwen3_vision(text: Settings) -> Settings:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": text["hidden_size"]}
    more = {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36}
    return _qwen_vision(text) | sizes | more | {"initializer_range": text["initializer_range"]}


def _llava_vision(text: Settings) -> Settings:
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": _LLAVA_FRAME,
        "patch_size": 8,
        "vision_use_head": False,
    }


def _qwen_ids(tokenizer: PreTrainedTokenizerFast) -> Settings:
    token_id = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
    }


def _llava_ids(tokenizer: PreTrainedTokenizerFast) -> Settings:
    token_id = tokenizer.convert_tokens_to_ids
    return {
        "image_token_index": token_id("<|image_pad|>"),
        "video_token_index": token_id("<|video_pad|>"),
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[_LLAVA_FRAME, _LLAVA_FRAME]],
    }


def _qwen_processor(processor: Any, video_processor: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    size = {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}
    shared = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    video = {"min_frames": 2, "max_frames": 4096, "cap_pixels_per_frame": False, "do_sample_frames": False}
    if video_processor is Qwen3VLVideoProcessor:  # its limits are a whole video's
        video["size"] = {"shortest_edge": 2 * 32 * 32, "longest_edge": 12 * 96 * 96}
    return processor(
        image_processor=Qwen2VLImageProcessor(**shared, size=size),
        tokenizer=tokenizer,
        video_processor=video_processor(**({**shared, "size": size} | video)),
        chat_template=TEMPLATE,
    )


def _llava_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    size = {"height": _LLAVA_FRAME, "width": _LLAVA_FRAME}
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=[[_LLAVA_FRAME, _LLAVA_FRAME]]),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=(_LLAVA_FRAME // 8) ** 2,
        vision_feature_select_strategy="full",
        chat_template=LLAVA_TEMPLATE,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
    )


_PARTS = {
    "qwen2_vl": _Parts(
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        _rope,
        _qwen2_vision,
        _qwen_ids,
        lambda tokenizer: _qwen_processor(Qwen2VLProcessor, Qwen2VLVideoProcessor, tokenizer),
    ),
    "qwen2_5_vl": _Parts(
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        _rope,
        _qwen25_vision,
        _qwen_ids,
        lambda tokenizer: _qwen_processor(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, tokenizer),
    ),
    "llava_onevision": _Parts(
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        _llava_text,
        _llava_vision,
        _llava_ids,
        _llava_processor,
    ),
    "qwen3_vl": _Parts(
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        _qwen3_text,
        _qwen3_vision,
        _qwen_ids,
        lambda tokenizer: _qwen_processor(Qwen3VLProcessor, Qwen3VLVideoProcessor, tokenizer),
    ),
}
