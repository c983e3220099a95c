"""Qwen2-VL: a tower of another build that sees frame pairs, and temporal positions that count them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor

from bench.world.facts import CELLS
from bench.world.families.base import WorldFamily
from bench.world.families.qwen2_5_vl import MROPE_SECTION
from bench.world.families.qwen_parts import QWEN_CHAT, image_processor, patchify, token_ids, video_processor
from bench.world.model import ModelSize, finish, text_config
from bench.world.positions import TOKENS_PER_SECOND, Grid, video_positions
from bench.world.tokenizer import CHAT_TEMPLATE, build_tokenizer


class Qwen2Vl(WorldFamily):
    name = "qwen2_vl"
    chat = QWEN_CHAT
    frame_stride = 1
    usual_intervals = (1,)

    def build_config(self, size: ModelSize) -> Qwen2VLConfig:
        vision = {
            "depth": size.vision_depth,
            "embed_dim": size.vision_hidden_size,
            "hidden_size": size.hidden_size,
            "mlp_ratio": size.vision_intermediate_size // size.vision_hidden_size,
            "num_heads": size.vision_num_heads,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        }
        text = text_config(size, mrope_section=MROPE_SECTION)
        return Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **token_ids())

    def build_model(self, size: ModelSize) -> Qwen2VLForConditionalGeneration:
        return finish(Qwen2VLForConditionalGeneration(self.build_config(size)))

    def build_processor(self) -> Qwen2VLProcessor:
        return Qwen2VLProcessor(
            image_processor=image_processor(),
            tokenizer=build_tokenizer(),
            video_processor=video_processor(),
            chat_template=CHAT_TEMPLATE,
        )

    def patches(self, frames: NDArray[np.float32]) -> Tensor:
        return patchify(frames)

    def encode(self, model: Any, patches: Tensor, num_rows: int) -> Tensor:
        num_pairs = len(patches) // (4 * CELLS * num_rows)
        grid = torch.tensor([[num_pairs, 6, 6]] * num_rows, device=patches.device)
        features: Tensor = model.model.visual(patches, grid_thw=grid).pooler_output
        return features

    def vision_parts(self, model: Any) -> nn.ModuleDict:
        return nn.ModuleDict({"visual": model.model.visual})

    def video_positions(self, start: int, num_steps: int, interval: float) -> Tensor:
        return video_positions(start, Grid(num_steps, 6, 6, interval / TOKENS_PER_SECOND))
