"""The contexts a verifier holds, who uses them, and which one goes when memory is short.

    slab of     written by          read by                               freed
    a context   its prefill, once   every answer about it, their drafters   when released or evicted, and unused
    its tensors its prefill, once   answers that ask for relevance         with the slab
    a thread    its answer          that answer and its drafter             when the stream ends, after the running step

Bookkeeping happens on the event loop; memory itself is freed on the device thread, after the steps that were queued
before, so that nothing is freed under a running step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.kv_pool import AnySlab, Slab, TensorSlab
from engine.visual_rows import Span
from foveate.context_source import FROM_MEDIA, ContextFetch, ContextSource
from foveate.rpc.errors import NotFound, Unavailable
from foveate.video import ContextTimings, VideoFacts
from verifier_svc.identity import context_name
from verifier_svc.timeline import FrameSampling

_ANY_SAMPLING = FrameSampling(fps=0.0, max_frames=0)


@dataclass(frozen=True)
class ContextFacts:
    """A prefilled video; its slab's rows are exactly its tokens.

    Visual tokens fill the runs of rows `visual_spans`, (start, number) each, ascending. The RoPE position of the token
    at sequence index i >= num_tokens is i + position_delta. `grid` is the video's (time, rows, columns) in patches
    before merging. `kv_bytes` are taken in the pool, alignment and tensors beside the KV included.
    """

    context_id: str
    num_tokens: int
    visual_spans: tuple[Span, ...]
    position_delta: int
    grid: tuple[int, int, int]
    second_per_grid: float
    video: VideoFacts
    timings: ContextTimings
    kv_bytes: int
    create_time_ns: int
    tenant: str = ""
    media_sha256: str = ""
    media_bytes: int = 0
    sampling: FrameSampling = _ANY_SAMPLING

    @property
    def num_visual_tokens(self) -> int:
        """Number of visual tokens in all runs."""
        return sum(num_tokens for _, num_tokens in self.visual_spans)

    @property
    def name(self) -> str:
        """The resource name."""
        return context_name(self.context_id)


@dataclass
class HeldContext:
    """A context in the pool with its users; changed by the store only.

    `tensors` are what is kept beside the KV, by names that say all their content depends on beside model and video;
    every cold copy of the KV has them too, and they come back bit for bit. `cold_bytes` tells what the cold tier
    has; `fencing_token` tells writers apart, the newest being the highest.
    """

    facts: ContextFacts
    slab: Slab
    tensors: Mapping[str, TensorSlab] = field(default_factory=dict)
    fetch: ContextFetch = FROM_MEDIA
    cold_bytes: dict[ContextSource, int] = field(default_factory=dict)
    fencing_token: int = 0
    num_users: int = 0
    num_hits: int = 0
    is_pinned: bool = False
    is_released: bool = False
    last_used_s: float = field(default_factory=time.monotonic)

    @property
    def is_lossy(self) -> bool:
        """Whether its keys and values came back in eight bits; it is never written, announced or created as exact."""
        return self.fetch.source is ContextSource.COLD_KV_INT8

    @property
    def slabs(self) -> tuple[AnySlab, ...]:
        """All memory of the context."""
        return (self.slab, *self.tensors.values())


class ContextStore:
    """Contexts by id. `free` is called with a slab that nobody uses any more, and frees it on the device thread."""

    def __init__(
        self, free: Callable[[AnySlab], None], *, on_gone: Callable[[str], None] = lambda context_id: None
    ) -> None:
        """`on_gone` is called with the id of a context that new answers no longer find here."""
        self._free = free
        self._on_gone = on_gone
        self._held: dict[str, HeldContext] = {}
        self._num_slabs_released_in_use = 0
        self.num_hits = 0

    @property
    def num_slabs(self) -> int:
        """Number of slabs of contexts in the pool, those of released contexts still in use included."""
        return sum(len(held.slabs) for held in self._held.values()) + self._num_slabs_released_in_use

    @property
    def num_bytes(self) -> int:
        """Bytes of the contexts that are held; may be read from any thread."""
        return sum(held.facts.kv_bytes for held in list(self._held.values()))

    def get(self, context_id: str) -> HeldContext | None:
        """Returns a context, or None when it is not held; it counts as used now."""
        held = self._held.get(context_id)
        if held is not None:
            held.last_used_s = time.monotonic()
        return held

    def hit(self, context_id: str) -> HeldContext | None:
        """As `get`, for somebody who would otherwise have made the context: it counts as a hit."""
        held = self.get(context_id)
        if held is not None:
            held.num_hits += 1
            self.num_hits += 1
        return held

    def hit_exact(self, context_id: str) -> HeldContext | None:
        """As `hit`, for somebody who has the video: a lossy context is forgotten for new answers, and made anew."""
        held = self._held.get(context_id)
        if held is not None and held.is_lossy:
            self.release(context_id)
        return self.hit(context_id)

    def newest_first(self) -> list[HeldContext]:
        """Returns what is held."""
        return sorted(self._held.values(), key=lambda held: held.facts.create_time_ns, reverse=True)

    def add(
        self,
        facts: ContextFacts,
        slab: Slab,
        tensors: Mapping[str, TensorSlab] | None = None,
        *,
        fetch: ContextFetch = FROM_MEDIA,
    ) -> HeldContext:
        """Takes over a ready context and its memory."""
        assert facts.context_id not in self._held, "one context, one slab"
        held = self._held[facts.context_id] = HeldContext(facts, slab, tensors or {}, fetch)
        return held

    def acquire(self, context_id: str) -> HeldContext:
        """Returns a context for one answer, which must give it back; NOT_FOUND when it is not held."""
        held = self.get(context_id)
        if held is None:
            raise not_held(context_id)
        held.num_users += 1
        return held

    def give_back(self, held: HeldContext) -> None:
        """Ends one answer's use; a context released in the meantime is freed with the last use."""
        held.num_users -= 1
        held.last_used_s = time.monotonic()
        if held.is_released and held.num_users == 0:
            self._num_slabs_released_in_use -= len(held.slabs)
            self._free_all(held)

    def release(self, context_id: str) -> None:
        """Forgets a context for new answers; its memory goes now or with the last answer. NOT_FOUND when not held."""
        held = self._held.pop(context_id, None)
        if held is None:
            raise not_held(context_id)
        self._on_gone(context_id)
        held.is_released = True
        if held.num_users == 0:
            self._free_all(held)
        else:
            self._num_slabs_released_in_use += len(held.slabs)

    def idle_bytes(self) -> int:
        """Bytes of contexts that no answer uses: what eviction could give."""
        return sum(held.facts.kv_bytes for held in self._idle())

    def evict_idle(self) -> bool:
        """Frees the context that has been idle for longest; False when every one is in use or pinned."""
        idle = self._idle()
        if not idle:
            return False
        self.release(min(idle, key=lambda held: held.last_used_s).facts.context_id)
        return True

    def expire_idle(self, ttl_s: float) -> None:
        """Frees the contexts that nobody has used for `ttl_s`."""
        limit_s = time.monotonic() - ttl_s
        for held in [held for held in self._idle() if held.last_used_s < limit_s]:
            self.release(held.facts.context_id)

    def _free_all(self, held: HeldContext) -> None:
        for slab in held.slabs:
            self._free(slab)

    def _idle(self) -> list[HeldContext]:
        return [held for held in self._held.values() if held.num_users == 0 and not held.is_pinned]


def not_held(context_id: str) -> NotFound:
    """Returns the error for a context that is not in the pool."""
    name = context_name(context_id)
    return NotFound(f"{name} is not held; create it again", reason="CONTEXT_NOT_HELD", resource=("context", name))


def cold_unreachable(context_id: str) -> Unavailable:
    """Returns the error for a context that is not in the pool while nobody can tell whether it is in the cold tier."""
    return Unavailable(
        f"{context_name(context_id)} is not in memory, and the cold tier does not answer",
        reason="COLD_TIER_UNREACHABLE",
        retry_after_s=1.0,
    )
