"""What a verifier process is made of once its model is loaded; built once, shared by every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.families import GridShape
from engine.frames import FrameProcessor
from engine.kv_pool import KvPool
from engine.layout import dtype_name
from engine.loading import LoadedModel, ModelError, load_model
from engine.preprocessing import patches_digest
from engine.relevance import RelevanceSettings
from engine.runner import TextRunner
from verifier_svc.config import VerifierConfig
from verifier_svc.identity import ModelIdentity
from verifier_svc.prompt import PromptBuilder


@dataclass(frozen=True)
class EngineParts:
    """Model, kernels, memory and prompt rules; `runner` and `pool` are touched on the device thread only."""

    loaded: LoadedModel
    runner: TextRunner
    pool: KvPool
    frames: FrameProcessor
    prompts: PromptBuilder
    identity: ModelIdentity
    relevance: RelevanceSettings
    patches_digest: str
    vocab_size: int

    @classmethod
    def load(cls, config: VerifierConfig) -> EngineParts:
        """Loads the checkpoint and makes the pool, on the device thread.

        Raises ModelError for a checkpoint that cannot be run, OSError, RuntimeError or ValueError for a pool that
        cannot be made.
        """
        loaded = load_model(config.model_path, device=config.device, dtype=config.dtype, device_map=config.device_map)
        relevance = _relevance(config, loaded)
        frames = _frames(loaded)
        prompts = PromptBuilder(
            chat_template=loaded.chat_template,
            tokenizer_json=loaded.tokenizer_json,
            special_tokens=loaded.processor.tokenizer.special_tokens_map,
            video_token_id=loaded.family.video_token_id,
        )
        identity = ModelIdentity(
            model_fingerprint=loaded.fingerprint,
            dtype=dtype_name(loaded.dtype),
            deterministic=config.deterministic,
            processor_settings=frames.settings(),
            prompt_token_ids=_sample_prompt(loaded, prompts),
        )
        runner = TextRunner(loaded, deterministic=config.deterministic, kernel_cache=config.kernel_cache)
        pool = KvPool.create(
            loaded.layout,
            pool_bytes=config.pool_bytes,
            device=loaded.device,
            model_fingerprint=loaded.fingerprint,
        )
        digest = patches_digest(frames)
        vocab_size = loaded.tokenizer.get_vocab_size(with_added_tokens=True)
        return cls(loaded, runner, pool, frames, prompts, identity, relevance, digest, vocab_size)

    def context_token_ids(self, grid: GridShape, timestamps_s: Sequence[float]) -> list[int]:
        """Returns the tokens of a context: system prompt and a video of this grid with frames at these times."""
        return self.prompts.context_token_ids(self.loaded.family.video_text(grid, timestamps_s))


def _frames(loaded: LoadedModel) -> FrameProcessor:
    try:
        return loaded.family.frames(loaded.processor.video_processor)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _sample_prompt(loaded: LoadedModel, prompts: PromptBuilder) -> list[int]:
    """A context's tokens, of a video of one step: what differs between templates shows in it."""
    family = loaded.family
    side = family.spatial_merge_size
    try:
        return prompts.context_token_ids(family.video_text((1, side, side), (0.0,)))
    except ValueError as error:
        raise ModelError(f"{loaded.name}: {error}") from error


def _relevance(config: VerifierConfig, loaded: LoadedModel) -> RelevanceSettings:
    try:
        return RelevanceSettings.read(config.model_path, loaded.layout.num_layers)
    except (ValueError, TypeError) as error:
        raise ModelError(str(error)) from error
