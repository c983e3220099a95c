"""Greedy answers of a checkpoint about video files, with positions by the release rule passed explicitly.

A file is read in chunks, so that a video of any length fits; it is prefilled once for all questions about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.cache_utils import DynamicCache

import engine.families
from bench.world.engine_backend import EngineBackend
from bench.world.families import WorldFamily, family_of
from bench.world.model import TOKEN_ID
from bench.world.mp4 import iterate_mp4, write_mp4
from bench.world.scenes import World
from engine.loading import load_model

FPS = 4.0
MAX_NEW_TOKENS = 200
PREFILL_CHUNK_TOKENS = 1024
VIDEO_PAD = "<|video_pad|>"

Frames = NDArray[np.uint8]  # [num_frames, height, width, 3]


class Backend(Protocol):
    """A text model that holds one prefix at a time."""

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Input embeddings [num_tokens, hidden]."""

    def prefill(self, chunks: Iterable[tuple[Tensor, Tensor]], num_tokens: int) -> None:
        """Takes a prefix instead of the one before, as embeddings [n, hidden] and positions [3, n] piece by piece."""

    def greedy(self, token_ids: Sequence[int], positions: Tensor, *, end_id: int, max_new_tokens: int) -> list[int]:
        """The most likely tokens after the prefix and these, without the end; the prefix stays as it was."""


class TransformersBackend:
    """transformers' own forward and cache."""

    def __init__(self, model: Any, family: WorldFamily) -> None:
        self._text, self._lm_head, self._family = model.model.language_model, model.lm_head, family
        self._device = self._lm_head.weight.device
        self._cache = DynamicCache()

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> Tensor:
        embeds: Tensor = self._text.embed_tokens(torch.tensor(token_ids, device=self._device))
        return embeds

    @torch.inference_mode()
    def prefill(self, chunks: Iterable[tuple[Tensor, Tensor]], num_tokens: int) -> None:
        self._cache = DynamicCache()
        for embeds, positions in chunks:
            self._forward(embeds, positions)

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], positions: Tensor, *, end_id: int, max_new_tokens: int) -> list[int]:
        num_before = self._cache.get_seq_length()
        chosen = self._forward(self.embed(token_ids), positions)
        position, out = int(positions.max()) + 1, list[int]()
        while chosen != end_id and len(out) < max_new_tokens:
            out.append(chosen)
            chosen = self._forward(self.embed([chosen]), torch.full((3, 1), position))
            position += 1
        self._cache.crop(num_before - self._cache.get_seq_length())
        return out

    def _forward(self, embeds: Tensor, positions: Tensor) -> int:
        """The most likely next token."""
        hidden = self._text(
            inputs_embeds=embeds[None],
            position_ids=self._family.position_ids(positions[:, None].to(self._device)),
            cache=self._cache,
            use_cache=True,
        ).last_hidden_state
        return int(self._lm_head(hidden[0, -1]).argmax())


@dataclass(frozen=True)
class Reply:
    text: str
    token_ids: list[int]
    hit_limit: bool  # no end within MAX_NEW_TOKENS


class Answerer:
    """Asks one model; the vision tower and the processor are always the real ones."""

    def __init__(self, model: Any, processor: Any, family: WorldFamily, backend: Backend) -> None:
        self.model, self.processor, self.family, self.backend = model, processor, family, backend
        self._end_id = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")

    @classmethod
    def load(cls, checkpoint: str | PathLike[str], *, use_engine: bool = True) -> Answerer:
        """With the engine's kernels where it knows the model, else with transformers'."""
        family = family_of(checkpoint)
        if use_engine and family.name in engine.families.FAMILIES:
            loaded = load_model(Path(checkpoint))
            return cls(loaded.model, loaded.processor, family, EngineBackend(loaded))
        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        return cls(model, AutoProcessor.from_pretrained(checkpoint), family, TransformersBackend(model, family))

    def answer(self, world: World, questions: Sequence[str]) -> list[str]:
        """Through an mp4 file in a temporary folder; each question is asked by itself."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            write_mp4(world, path, fps=FPS)
            reading = self.begin()
            for frames in iterate_mp4(path):
                reading.see(frames)
            return [reply.text for reply in reading.ask(questions)]

    def begin(self) -> Reading:
        return Reading(self, self._end_id)


class Reading:
    """A video being read, then asked about; another one may begin only when this one is done."""

    def __init__(self, answerer: Answerer, end_id: int) -> None:
        self._processor, self._family, self._model = answerer.processor, answerer.family, answerer.model
        self._backend, self._end_id = answerer.backend, end_id
        self._features: list[Tensor] = []
        self._num_frames = 0

    @torch.inference_mode()
    def see(self, frames: Frames) -> None:
        """Takes the next frames, FPS of them a second; an even number except at the end."""
        self._num_frames += len(frames)
        read = torch.from_numpy(frames[:: self._family.frame_stride]).permute(0, 3, 1, 2)
        processed = self._processor.video_processor(videos=[read], do_sample_frames=False, return_tensors="pt")
        patches = processed["pixel_values_videos"]
        patches = patches[0] if patches.dim() == 5 else patches
        self._features.append(self._family.encode(self._model, patches.to(self._model.device), 1))

    def ask(self, questions: Sequence[str]) -> list[Reply]:
        """Each by itself, about the whole video."""
        first, _, num_prefix = self.prefill(questions[0])
        num_visual = first.count(TOKEN_ID[VIDEO_PAD])
        return [self._ask(self._prompt(question, num_visual), num_prefix) for question in questions]

    def prefill(self, question: str) -> tuple[list[int], Tensor, int]:
        """Gives the backend the video; returns a question's whole prompt, its positions, and the prefix's length."""
        features = self._family.join(self._features)  # [num_visual_tokens, hidden]
        prompt = self._prompt(question, len(features))
        num_prefix = max(index for index, token in enumerate(prompt) if token == TOKEN_ID[VIDEO_PAD]) + 1
        self._prefill(prompt[:num_prefix], features)
        return prompt, self._positions(prompt), num_prefix

    def _prompt(self, question: str, num_visual: int) -> list[int]:
        content = [{"type": "video"}, {"type": "text", "text": question}]
        text = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        token_ids: list[int] = self._processor.tokenizer(text.replace(VIDEO_PAD, VIDEO_PAD * num_visual))["input_ids"]
        return token_ids

    def _positions(self, prompt: list[int]) -> Tensor:
        num_steps = -(-self._num_frames // 2)
        return self._family.prompt_positions(torch.tensor(prompt), num_steps=num_steps, second_per_step=2 / FPS)

    def _prefill(self, prefix: list[int], features: Tensor) -> None:
        positions = self._positions(prefix)
        embeds = self._backend.embed(prefix).clone()
        embeds[torch.tensor(prefix) == TOKEN_ID[VIDEO_PAD]] = features
        pieces = zip(embeds.split(PREFILL_CHUNK_TOKENS), positions.split(PREFILL_CHUNK_TOKENS, dim=1), strict=True)
        self._backend.prefill(pieces, len(prefix))

    def _ask(self, prompt: list[int], num_prefix: int) -> Reply:
        token_ids = self._backend.greedy(
            prompt[num_prefix:],
            self._positions(prompt)[:, num_prefix:],
            end_id=self._end_id,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        text = self._processor.tokenizer.decode(token_ids)
        return Reply(text, token_ids, len(token_ids) == MAX_NEW_TOKENS)
