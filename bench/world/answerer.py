"""Greedy answers of a checkpoint from video files, with positions by the release rule passed explicitly."""

from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.cache_utils import DynamicCache

from bench.world.mp4 import read_mp4, write_mp4
from bench.world.positions import Grid, prompt_positions
from bench.world.scenes import World

FPS = 4.0
MAX_NEW_TOKENS = 200


class Answerer:
    """The plainest correct way to ask a checkpoint; a reference, not the engine."""

    def __init__(self, checkpoint: str | PathLike[str]) -> None:
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._end = self.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")

    def answer(self, world: World, question: str) -> str:
        """Through an mp4 file in a temporary folder."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            write_mp4(world, path, fps=FPS)
            return self.answer_frames(read_mp4(path), question)

    def answer_frames(self, frames: NDArray[np.uint8], question: str) -> str:
        inputs = self._inputs(frames, question)
        t, h, w = inputs["video_grid_thw"][0].tolist()
        grid = Grid(t, h, w, float(inputs["second_per_grid_ts"][0]))
        positions = prompt_positions(inputs["input_ids"][0], self.model.config.video_token_id, grid)
        return self._greedy(inputs, positions)

    def _inputs(self, frames: NDArray[np.uint8], question: str) -> dict[str, Tensor]:
        content = [{"type": "video"}, {"type": "text", "text": question}]
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        metadata = {"fps": FPS, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
        inputs: dict[str, Tensor] = self.processor(
            text=[prompt],
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            videos_kwargs={"video_metadata": [metadata], "do_sample_frames": False},
            return_tensors="pt",
        )
        return inputs

    @torch.inference_mode()
    def _greedy(self, inputs: dict[str, Tensor], positions: Tensor) -> str:
        cache = DynamicCache()
        prompt = {name: inputs[name] for name in ("input_ids", "pixel_values_videos", "video_grid_thw")}
        logits = self.model(
            **prompt, position_ids=positions[:, None], cache=cache, use_cache=True, logits_to_keep=1
        ).logits
        token_ids: list[int] = []
        position = int(positions.max()) + 1
        while len(token_ids) < MAX_NEW_TOKENS:
            token = int(logits[0, -1].argmax())
            if token == self._end:
                break
            token_ids.append(token)
            at = torch.full((3, 1, 1), position)
            logits = self.model(input_ids=torch.tensor([[token]]), position_ids=at, cache=cache, use_cache=True).logits
            position += 1
        text: str = self.processor.tokenizer.decode(token_ids)
        return text
