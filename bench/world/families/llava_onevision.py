"""LLaVA-OneVision: frames are seen one by one by a SigLIP tower, pooled 2 x 2, and stand in one line of positions.

A frame becomes nine visual tokens, a video ends with one newline token. The tower cannot see motion: the language model
must compare frames. So every second frame of the world is enough, and motion is twice as large between two of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
)
from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor

from bench.world.facts import CELLS, FRAME_SIZE
from bench.world.families.base import ChatFormat, WorldFamily
from bench.world.model import TOKEN_ID, ModelSize, finish, text_config
from bench.world.tokenizer import build_tokenizer

PATCH_SIZE = 8
PATCHES_PER_FRAME = (FRAME_SIZE // PATCH_SIZE) ** 2
# LLaVA-OneVision's template: visual content first, no system prompt of its own, no line break between turns. An earlier
# answer follows a line break as a new one does, so that a conversation's tokens do not change when it goes on.
CHAT_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] }}\
{{ '\\n' if message['role'] == 'assistant' else ' ' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<|image_pad|>\\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<|video_pad|>\\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}\
{% endif %}{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class LlavaOnevision(WorldFamily):
    name = "llava_onevision"
    chat = ChatFormat(
        before_video="<|im_start|>user ",
        after_video="\n",
        to_assistant="<|im_end|><|im_start|>assistant\n",
        to_user="<|im_start|>user",
        before_later_question=" ",
    )
    frame_stride = 2
    usual_intervals = (1,)
    sees_motion = False

    def build_config(self, size: ModelSize) -> LlavaOnevisionConfig:
        vision = {
            "model_type": "siglip_vision_model",
            "hidden_size": size.vision_hidden_size,
            "intermediate_size": size.vision_intermediate_size,
            "num_hidden_layers": size.vision_depth,
            "num_attention_heads": size.vision_num_heads,
            "image_size": FRAME_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        }
        return LlavaOnevisionConfig(
            text_config={"model_type": "qwen2", **text_config(size)},
            vision_config=vision,
            image_token_index=TOKEN_ID["<|image_pad|>"],
            video_token_index=TOKEN_ID["<|video_pad|>"],
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
            image_grid_pinpoints=[[FRAME_SIZE, FRAME_SIZE]],
            tie_word_embeddings=True,
        )

    def build_model(self, size: ModelSize) -> LlavaOnevisionForConditionalGeneration:
        return finish(LlavaOnevisionForConditionalGeneration(self.build_config(size)))

    def build_processor(self) -> LlavaOnevisionProcessor:
        common = {
            "size": {"height": FRAME_SIZE, "width": FRAME_SIZE},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
        return LlavaOnevisionProcessor(
            image_processor=LlavaOnevisionImageProcessor(**common, image_grid_pinpoints=[[FRAME_SIZE, FRAME_SIZE]]),
            tokenizer=build_tokenizer(),
            video_processor=LlavaOnevisionVideoProcessor(**common),
            num_image_tokens=PATCHES_PER_FRAME,
            vision_feature_select_strategy="full",
            chat_template=CHAT_TEMPLATE,
            image_token="<|image_pad|>",
            video_token="<|video_pad|>",
        )

    def patches(self, frames: NDArray[np.float32]) -> Tensor:
        """[num_steps, 3, 48, 48]"""
        return torch.from_numpy(frames[:: self.frame_stride]).permute(0, 3, 1, 2).div(127.5).sub(1)

    def encode(self, model: Any, patches: Tensor, num_rows: int) -> Tensor:
        videos = patches.reshape(num_rows, -1, *patches.shape[1:])
        config = model.config
        features: Tensor = model.model.get_video_features(
            videos,
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            return_dict=True,
        ).pooler_output
        return features.flatten(0, 1)

    def vision_parts(self, model: Any) -> nn.ModuleDict:
        core = model.model
        newline = nn.ParameterDict({"image_newline": core.image_newline})
        return nn.ModuleDict({"tower": core.vision_tower, "projector": core.multi_modal_projector, "newline": newline})

    def num_visual_tokens(self, num_steps: int) -> int:
        return num_steps * CELLS + 1

    def cell_features(self, features: Tensor, num_rows: int) -> Tensor:
        return features.reshape(num_rows, -1, features.shape[-1])[:, :-1].flatten(0, 1)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The newline token stands once, at the end."""
        return torch.cat([*(piece[:-1] for piece in pieces), pieces[-1][-1:]])

    def video_positions(self, start: int, num_steps: int, interval: float) -> Tensor:
        """One position a token; an interval above 1 leaves gaps between frames, which only training does."""
        frame_at = (torch.arange(num_steps) * interval * CELLS).long()
        cells = (frame_at[:, None] + torch.arange(CELLS)).flatten()
        return (torch.cat([cells, cells[-1:] + 1]) + start).expand(3, -1)

    def position_ids(self, positions: Tensor) -> Tensor:
        return positions[0]
