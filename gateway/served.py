"""What the gateway serves now: the verifier that answers, and the tokenizer of its model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import tokenizers

import foveate
from foveate.rpc.errors import FailedPrecondition, Internal
from gateway.clients import VerifierClient
from gateway.config import GatewayConfig
from gateway.facts import Limits, VerifierInfo
from gateway.values import OpenedSequence

_MAX_DRAFT_TOKENS = 16


@dataclass(frozen=True)
class Served:
    """A verifier that is SERVING, as it was when it became so."""

    verifier: VerifierClient
    info: VerifierInfo
    tokenizer: tokenizers.Tokenizer
    limits: Limits

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        return size

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
    if _minor(info.version) != _minor(foveate.__version__):
        raise FailedPrecondition(
            f"the verifier runs Foveate {info.version}, this gateway {foveate.__version__}", reason="VERSION_MISMATCH"
        )
    tokenizer = await cache.get(verifier, info.tokenizer_sha256)
    return Served(verifier, info, tokenizer, limits_of(info, config))


def limits_of(info: VerifierInfo, config: GatewayConfig) -> Limits:
    """Returns the verifier's limits with the gateway's defaults, clipped to them."""
    ceiling = min(config.max_tokens_ceiling, info.max_thread_tokens or config.max_tokens_ceiling)
    max_draft_tokens = min(info.max_draft_tokens or _MAX_DRAFT_TOKENS, _MAX_DRAFT_TOKENS)
    return Limits(
        max_upload_bytes=info.max_upload_bytes,
        max_frames=info.max_frames,
        max_visual_tokens=info.max_visual_tokens,
        max_thread_tokens=info.max_thread_tokens,
        max_draft_tokens=max_draft_tokens,
        max_tokens_ceiling=ceiling,
        default_max_tokens=min(config.default_max_tokens, ceiling),
        default_num_draft_tokens=min(config.default_num_draft_tokens, max_draft_tokens),
        default_visual_budget=config.default_visual_budget,
        default_fps=info.default_fps,
    )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
