"""What the gateway serves now: the verifier that answers, and the tokenizer of its model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import tokenizers

from foveate.rpc.errors import Internal
from gateway.clients import VerifierClient
from gateway.config import GatewayConfig
from gateway.facts import AcceptanceLimits, Limits, VerifierInfo
from gateway.handshake import check_version
from gateway.sequences import SequenceOpener
from gateway.values import MAX_DRAFT_TOKENS, OpenedSequence
from gateway.vocabulary import TokenizerVocabulary


@dataclass(frozen=True)
class Served:
    """A verifier that is SERVING, as it was when it was last looked at. Answers open their sequences with `opener`."""

    verifier: VerifierClient
    info: VerifierInfo
    tokenizer: tokenizers.Tokenizer
    vocabulary: TokenizerVocabulary
    limits: Limits
    opener: SequenceOpener

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.limits.vocab_size

    def room_for_answer(self, opened: OpenedSequence) -> int:
        """Returns how many tokens an answer may have on top of its prompt; 0 or less when the prompt took all.

        A slab may have more rows than a conversation may have tokens: its size is rounded up.
        """
        limit = self.limits.max_thread_tokens
        num_thread_tokens = opened.num_prompt_tokens - opened.num_context_tokens
        return min(opened.room, limit - num_thread_tokens) if limit else opened.room


class TokenizerCache:
    """The last tokenizer, by the SHA-256 of its file, so that a verifier that comes back costs no transfer."""

    def __init__(self) -> None:
        self._sha256 = ""
        self._tokenizer: tokenizers.Tokenizer | None = None

    async def get(self, verifier: VerifierClient, sha256: str) -> tokenizers.Tokenizer:
        """Returns the verifier's tokenizer. Raises Internal when its bytes are not those that were announced."""
        if self._tokenizer is None or self._sha256 != sha256:
            data = await verifier.tokenizer_json()
            if hashlib.sha256(data).hexdigest() != sha256:
                raise Internal("the verifier's tokenizer.json is not the one it announced", reason="TOKENIZER_MISMATCH")
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            self._sha256 = sha256
        return self._tokenizer


async def look_at(verifier: VerifierClient, cache: TokenizerCache, config: GatewayConfig) -> Served:
    """Returns what a verifier serves. Raises FailedPrecondition when its version does not fit this gateway's."""
    info = await verifier.info()
    check_version("verifier", info.version)
    tokenizer = await cache.get(verifier, info.tokenizer_sha256)
    vocabulary = TokenizerVocabulary(tokenizer, info.eos_token_ids)
    return Served(verifier, info, tokenizer, vocabulary, _limits_of(info, config, tokenizer), verifier)


def _limits_of(info: VerifierInfo, config: GatewayConfig, tokenizer: tokenizers.Tokenizer) -> Limits:
    """Returns the verifier's limits with the gateway's defaults, clipped to them."""
    ceiling = min(config.max_tokens_ceiling, info.max_thread_tokens or config.max_tokens_ceiling)
    max_draft_tokens = min(info.max_draft_tokens or MAX_DRAFT_TOKENS, MAX_DRAFT_TOKENS)
    return Limits(
        max_upload_bytes=info.max_upload_bytes,
        max_frames=info.max_frames,
        max_visual_tokens=info.max_visual_tokens,
        max_thread_tokens=info.max_thread_tokens,
        max_draft_tokens=max_draft_tokens,
        max_tokens_ceiling=ceiling,
        default_max_tokens=min(config.default_max_tokens, ceiling),
        default_num_draft_tokens=min(config.default_num_draft_tokens, max_draft_tokens),
        adapts_draft_length=config.adapts_draft_length,
        default_visual_budget=config.default_visual_budget,
        default_fps=info.default_fps,
        acceptance=AcceptanceLimits(
            default=config.default_policy,
            allowed=config.allowed_policies,
            max_lambda=config.max_lambda,
            relevance=info.relevance,
        ),
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
    )
