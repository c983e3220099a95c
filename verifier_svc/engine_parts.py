"""What a verifier process is made of once its model is loaded; built once, shared by every request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_pool import KvPool
from engine.loading import LoadedModel, ModelError, load_model
from engine.preprocessing import patches_digest
from engine.relevance import RelevanceSettings
from engine.runner import TextRunner
from verifier_svc.config import VerifierConfig
from verifier_svc.frames import FrameProcessor
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
        loaded = load_model(config.model_path, device=config.device, dtype=config.dtype)
        relevance = _relevance(config, loaded)
        frames = FrameProcessor(loaded.processor.video_processor)
        prompts = PromptBuilder(
            chat_template=loaded.chat_template,
            tokenizer_json=loaded.tokenizer_json,
            special_tokens=loaded.processor.tokenizer.special_tokens_map,
            video_token_id=loaded.family.video_token_id,
        )
        identity = ModelIdentity(
            model_fingerprint=loaded.fingerprint,
            dtype=config.dtype,
            deterministic=config.deterministic,
            processor_settings=frames.settings(),
            prompt_token_ids=prompts.context_token_ids(0),
        )
        runner = TextRunner(loaded, deterministic=config.deterministic, kernel_cache=config.kernel_cache)
        pool = KvPool.create(
            loaded.layout,
            pool_bytes=config.pool_bytes,
            device=loaded.device,
            model_fingerprint=loaded.fingerprint,
        )
        digest = patches_digest(loaded.processor.video_processor)
        vocab_size = loaded.tokenizer.get_vocab_size(with_added_tokens=True)
        return cls(loaded, runner, pool, frames, prompts, identity, relevance, digest, vocab_size)


def _relevance(config: VerifierConfig, loaded: LoadedModel) -> RelevanceSettings:
    try:
        return RelevanceSettings.read(config.model_path, loaded.layout.num_layers)
    except (ValueError, TypeError) as error:
        raise ModelError(str(error)) from error
