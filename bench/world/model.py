"""Sizes of the tiny models, and what all of their text models share."""

from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 928
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOKEN_ID = {token: index for index, token in enumerate(SPECIAL_TOKENS)}


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a tiny model; head_dim is 32 throughout."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vision_depth: int
    vision_hidden_size: int
    vision_intermediate_size: int
    vision_num_heads: int


MODEL_SIZES = {
    "target": ModelSize(
        hidden_size=128,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=384,
        vision_depth=2,
        vision_hidden_size=96,
        vision_intermediate_size=192,
        vision_num_heads=3,
    ),
    "drafter": ModelSize(
        hidden_size=96,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        intermediate_size=256,
        vision_depth=2,
        vision_hidden_size=64,
        vision_intermediate_size=128,
        vision_num_heads=2,
    ),
}


def text_config(size: ModelSize, *, mrope_section: list[int] | None = None) -> dict[str, Any]:
    """Settings of a Qwen2 text model; with sections its positions have three axes."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if mrope_section is not None:
        rope["mrope_section"] = mrope_section
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": TOKEN_ID["<|im_end|>"],
        "pad_token_id": TOKEN_ID["<|endoftext|>"],
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }


def finish(model: Any) -> Any:
    """Lets `generate` stop at the end of a turn."""
    model.generation_config.eos_token_id = TOKEN_ID["<|im_end|>"]
    model.generation_config.pad_token_id = TOKEN_ID["<|endoftext|>"]
    return model
