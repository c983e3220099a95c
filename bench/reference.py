"""The independent reference: transformers' own model, processor, cache and `generate`, given explicit positions.

Nothing of the engine or the services is used here but the noise of the shared sampling, so that an error in ours cannot
hide in it. The positions come from the world's own statement of the release rule (bench/world/positions.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, LogitsProcessor

from bench.world.positions import Grid, prompt_positions
from engine.sampling import Sampling, gumbel_noise


@dataclass(frozen=True)
class Prompt:
    """A prompt as transformers wants it."""

    inputs: dict[str, Tensor]
    positions: Tensor  # [3, 1, num_tokens]

    @property
    def num_tokens(self) -> int:
        return int(self.inputs["input_ids"].shape[1])


@dataclass(frozen=True)
class Reference:
    """Token ids without the end token, and the top-2 margin of every choice, the end token's included."""

    token_ids: list[int]
    margins: list[float]


class TransformersReference:
    """transformers with stock scaled-dot-product attention, float32, on one thread or as many as torch was given."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self._end_id = int(self.processor.tokenizer.eos_token_id)

    def prompt(self, video: Path, question: str, *, fps: float) -> Prompt:
        """Reads every frame of `video`, which must have `fps` frames per second, and asks `question` about them."""
        frames = _read_frames(video)
        messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        metadata = {"fps": fps, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
        inputs = self.processor(
            text=[text],
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            videos_kwargs={"video_metadata": [metadata], "do_sample_frames": False},
            return_tensors="pt",
        )
        t, h, w = (int(size) for size in inputs["video_grid_thw"][0])
        grid = Grid(t, h, w, second_per_grid=2 / fps)
        positions = prompt_positions(inputs["input_ids"][0], self.model.config.video_token_id, grid)
        return Prompt(dict(inputs), positions[:, None])

    @torch.inference_mode()
    def generate(self, prompt: Prompt, *, max_tokens: int, sampling: Sampling) -> Reference:
        """Decodes with `generate`; at a temperature, with the same noise as ours, so that the sample is the same."""
        chooser = _NoisyChoice(sampling, prompt.num_tokens, _banned_ids(self.model.config))
        output = self.model.generate(
            **prompt.inputs,
            position_ids=prompt.positions,
            max_new_tokens=max_tokens,
            do_sample=False,
            logits_processor=[chooser],
        )
        token_ids = output[0, prompt.num_tokens :].tolist()
        if token_ids and token_ids[-1] == self._end_id:
            token_ids.pop()
        return Reference(token_ids, chooser.margins)


class _NoisyChoice(LogitsProcessor):
    """Makes the greedy choice of `generate` the shared-noise sample; keeps the margin of the two best tokens."""

    def __init__(self, sampling: Sampling, first_index: int, banned_ids: list[int]) -> None:
        self._sampling, self._index, self._banned_ids = sampling, first_index, banned_ids
        self.margins: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.double()
        scores[:, self._banned_ids] = -torch.inf
        if self._sampling.temperature > 0:
            index = range(self._index, self._index + 1)
            noise = gumbel_noise(self._sampling.seed, index, torch.arange(scores.shape[-1]))
            scores = scores / self._sampling.temperature + noise
        best, second = scores[0].topk(2).values.tolist()
        self.margins.append(best - second)
        self._index += 1
        return scores


def _banned_ids(config: Any) -> list[int]:
    return [config.video_token_id, config.image_token_id, config.vision_start_token_id]


def _read_frames(video: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with av.open(str(video)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
