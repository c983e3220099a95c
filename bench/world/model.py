"""Untrained Qwen2.5-VL models of tiny sizes."""

from dataclasses import dataclass

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

VOCAB_SIZE = 928
MROPE_SECTION = [4, 6, 6]  # of head_dim 32
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
    """Sizes of a tiny Qwen2.5-VL; head_dim is 32 throughout."""

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


def build_config(size: ModelSize) -> Qwen2_5_VLConfig:
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": MROPE_SECTION},
        "bos_token_id": None,
        "eos_token_id": TOKEN_ID["<|im_end|>"],
        "pad_token_id": TOKEN_ID["<|endoftext|>"],
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }
    vision = {
        "depth": size.vision_depth,
        "hidden_size": size.vision_hidden_size,
        "intermediate_size": size.vision_intermediate_size,
        "num_heads": size.vision_num_heads,
        "out_hidden_size": size.hidden_size,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 48,
        "fullatt_block_indexes": list(range(size.vision_depth)),
        "in_channels": 3,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=TOKEN_ID["<|image_pad|>"],
        video_token_id=TOKEN_ID["<|video_pad|>"],
        vision_start_token_id=TOKEN_ID["<|vision_start|>"],
        vision_end_token_id=TOKEN_ID["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def build_model(size: ModelSize) -> Qwen2_5_VLForConditionalGeneration:
    model = Qwen2_5_VLForConditionalGeneration(build_config(size))
    model.generation_config.eos_token_id = TOKEN_ID["<|im_end|>"]
    model.generation_config.pad_token_id = TOKEN_ID["<|endoftext|>"]
    return model
