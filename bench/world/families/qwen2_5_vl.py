"""Qwen2.5-VL: a tower that sees frame pairs, and temporal positions that follow the clock."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from bench.world.facts import CELLS
from bench.world.families.base import WorldFamily
from bench.world.families.qwen_parts import QWEN_CHAT, image_processor, patchify, token_ids, video_processor
from bench.world.model import ModelSize, finish, text_config
from bench.world.positions import TOKENS_PER_SECOND, Grid, video_positions
from bench.world.tokenizer import CHAT_TEMPLATE, build_tokenizer

MROPE_SECTION = [4, 6, 6]  # of head_dim 32


class Qwen25Vl(WorldFamily):
    name = "qwen2_5_vl"
    chat = QWEN_CHAT
    frame_stride = 1
    usual_intervals = (1, 1, 1, 2, 2, 4, 8)

    def build_config(self, size: ModelSize) -> Qwen2_5_VLConfig:
        vision = {
            "depth": size.vision_depth,
            "hidden_size": size.vision_hidden_size,
            "intermediate_size": size.vision_intermediate_size,
            "num_heads": size.vision_num_heads,
            "out_hidden_size": size.hidden_size,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": TOKENS_PER_SECOND,
            "window_size": 48,
            "fullatt_block_indexes": list(range(size.vision_depth)),
            "in_channels": 3,
        }
        text = text_config(size, mrope_section=MROPE_SECTION)
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **token_ids())

    def build_model(self, size: ModelSize) -> Qwen2_5_VLForConditionalGeneration:
        return finish(Qwen2_5_VLForConditionalGeneration(self.build_config(size)))

    def build_processor(self) -> Qwen2_5_VLProcessor:
        return Qwen2_5_VLProcessor(
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

    def interval(self, second_per_step: float) -> float:
        return second_per_step * TOKENS_PER_SECOND
