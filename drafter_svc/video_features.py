"""A small model's own look at a video: its vision tower over the verifier's patches, once per context.

    verifier's pool, read-only    patches of the context: frames after resizing and normalising, before any model
    owned here                    features of the last few contexts, the least recently used dropped

The drafter never sees the video file: decoding and sampling of frames happen in one place, the verifier.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from drafter_svc.drafts import VideoSource
from engine.kv_share import MappedPool
from engine.loading import LoadedModel

MAX_CONTEXTS = 8
_PATCHES_PER_STEP = 8192


class VideoFeatures:
    """Features by context. Only the device thread touches it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._by_context: OrderedDict[tuple[str, int, str], Tensor] = OrderedDict()

    def get(self, pool: MappedPool, video: VideoSource) -> Tensor:
        """Returns the features of a video, [num_visual_tokens, width]; raises ValueError, KvStale."""
        key = (pool.handle.pool_id, pool.handle.epoch, video.context)
        features = self._by_context.pop(key, None)
        if features is None:
            features = self._encode(pool.tensor_view(video.patches), video.grid)
            pool.check()  # after reading: the patches were the owner's
        self._by_context[key] = features
        while len(self._by_context) > MAX_CONTEXTS:
            self._by_context.popitem(last=False)
        return features

    def _encode(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Runs the tower a few steps of time at once; frames do not attend each other in it."""
        loaded, (num_steps, num_rows, num_columns) = self._loaded, grid
        per_step = num_rows * num_columns
        if patches.shape[0] != num_steps * per_step:
            raise ValueError(f"{patches.shape[0]} patches do not make a grid of {grid}")
        steps = max(1, _PATCHES_PER_STEP // per_step)
        pieces = []
        for start in range(0, num_steps, steps):
            stop = min(start + steps, num_steps)
            piece = patches[start * per_step : stop * per_step].to(device=loaded.device, dtype=loaded.dtype)
            shape = torch.tensor([[stop - start, num_rows, num_columns]], device=loaded.device)
            pieces.append(loaded.family.encode_video(loaded.model, piece, shape))
        return loaded.family.join_video(loaded.model, pieces)
