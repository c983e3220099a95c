"""What the two Qwen families share: chat format, special ids, and a processor of 8 x 8 patches merged 2 x 2."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from bench.world.facts import FRAME_SIZE
from bench.world.families.base import ChatFormat
from bench.world.model import TOKEN_ID
from bench.world.tokenizer import SYSTEM_PROMPT

QWEN_CHAT = ChatFormat(
    before_video=f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n<|vision_start|>",
    after_video="<|vision_end|>",
    to_assistant="<|im_end|>\n<|im_start|>assistant\n",
    to_user="\n<|im_start|>user\n",
)
# The limits on pixels are per frame as long as `cap_pixels_per_frame` is off, so they hold at any video length.
_COMMON = {
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"shortest_edge": 32 * 32, "longest_edge": FRAME_SIZE * FRAME_SIZE},
}


def video_processor() -> Qwen2VLVideoProcessor:
    """A frame of any size and shape becomes at most nine visual tokens a pair; a square one becomes 48 x 48 pixels."""
    return Qwen2VLVideoProcessor(
        **_COMMON, fps=4.0, min_frames=2, max_frames=16384, cap_pixels_per_frame=False, do_sample_frames=False
    )


def image_processor() -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(**_COMMON)


def token_ids() -> dict[str, int]:
    return {
        "image_token_id": TOKEN_ID["<|image_pad|>"],
        "video_token_id": TOKEN_ID["<|video_pad|>"],
        "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
        "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
    }


def patchify(frames: NDArray[np.float32]) -> Tensor:
    """Frames [num_frames, 48, 48, 3] as the video processor's patches [num_pairs * 36, 384]."""
    num_pairs = len(frames) // 2
    scaled = torch.from_numpy(frames).permute(0, 3, 1, 2).div(127.5).sub(1)
    blocks = scaled.reshape(num_pairs, 2, 3, 3, 2, 8, 3, 2, 8)
    return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(num_pairs * 36, 384)
