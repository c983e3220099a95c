"""The contexts a verifier holds, who uses them, and which one goes when memory is short.

    slab of     written by          read by                               freed
    a context   its prefill, once   every answer about it, their drafters   when released or evicted, and unused
    a thread    its answer          that answer and its drafter             when the stream ends, after the running step

Bookkeeping happens on the event loop; memory itself is freed on the device thread, after the steps that were queued
before, so that nothing is freed under a running step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv_pool import Slab
from foveate.rpc.errors import NotFound
from foveate.video import ContextTimings, VideoFacts
from verifier_svc.identity import context_name


@dataclass(frozen=True)
class ContextFacts:
    """A prefilled video; its slab's rows are exactly its tokens.

    Visual tokens fill rows [visual_start, visual_start + num_visual_tokens). The RoPE position of the token at sequence
    index i >= num_tokens is i + position_delta. `kv_bytes` are taken in the pool, alignment included.
    """

    context_id: str
    num_tokens: int
    visual_start: int
    num_visual_tokens: int
    position_delta: int
    video: VideoFacts
    timings: ContextTimings
    kv_bytes: int
    create_time_ns: int

    @property
    def name(self) -> str:
        """The resource name."""
        return context_name(self.context_id)


@dataclass
class HeldContext:
    """A context in the pool with its users; changed by the store only."""

    facts: ContextFacts
    slab: Slab
    num_users: int = 0
    is_released: bool = False
    last_used_s: float = field(default_factory=time.monotonic)


class ContextStore:
    """Contexts by id. `free` is called with a slab that nobody uses any more, and frees it on the device thread."""

    def __init__(self, free: Callable[[Slab], None]) -> None:
        self._free = free
        self._held: dict[str, HeldContext] = {}
        self._num_released_in_use = 0

    @property
    def num_slabs(self) -> int:
        """Number of context slabs in the pool, those of released contexts still in use included."""
        return len(self._held) + self._num_released_in_use

    def get(self, context_id: str) -> HeldContext | None:
        """Returns a context, or None when it is not held; it counts as used now."""
        held = self._held.get(context_id)
        if held is not None:
            held.last_used_s = time.monotonic()
        return held

    def newest_first(self) -> list[ContextFacts]:
        """Returns what is held."""
        facts = [held.facts for held in self._held.values()]
        return sorted(facts, key=lambda one: one.create_time_ns, reverse=True)

    def add(self, facts: ContextFacts, slab: Slab) -> HeldContext:
        """Takes over a prefilled context and its slab."""
        assert facts.context_id not in self._held, "one context, one slab"
        held = self._held[facts.context_id] = HeldContext(facts, slab)
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
            self._num_released_in_use -= 1
            self._free(held.slab)

    def release(self, context_id: str) -> None:
        """Forgets a context for new answers; its memory goes now or with the last answer. NOT_FOUND when not held."""
        held = self._held.pop(context_id, None)
        if held is None:
            raise not_held(context_id)
        held.is_released = True
        if held.num_users == 0:
            self._free(held.slab)
        else:
            self._num_released_in_use += 1

    def idle_bytes(self) -> int:
        """Bytes of contexts that no answer uses: what eviction could give."""
        return sum(held.facts.kv_bytes for held in self._held.values() if held.num_users == 0)

    def evict_idle(self) -> bool:
        """Frees the context that has been idle for longest; False when every one is in use."""
        idle = [held for held in self._held.values() if held.num_users == 0]
        if not idle:
            return False
        self.release(min(idle, key=lambda held: held.last_used_s).facts.context_id)
        return True


def not_held(context_id: str) -> NotFound:
    """Returns the error for a context that is not in the pool."""
    name = context_name(context_id)
    return NotFound(f"{name} is not held; create it again", reason="CONTEXT_NOT_HELD", resource=("context", name))
