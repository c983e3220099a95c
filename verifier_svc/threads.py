"""Threads of conversations that ended well, kept while there is room: the next turn copies what it has in common.

    a parked thread   written by its answer, never again   read (copied) by later answers   freed when memory is short,
                                                                                             or with its context

Keys and values of a row depend on the tokens up to it and on nothing else, so a common prefix of tokens is a common
prefix of rows, whether the tokens were drafted, verified or prefilled. Copying leaves the original to branches and to
an answer that is asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv_pool import Slab

_MAX_THREADS = 256


@dataclass(frozen=True)
class Parked:
    """A thread's rows and the tokens they are of."""

    context_id: str
    token_ids: tuple[int, ...]
    slab: Slab
    num_bytes: int


class ParkedThreads:
    """Least recently used first. `free` frees a slab on the device thread, after the copies that were queued before."""

    def __init__(self, free: Callable[[Slab], None]) -> None:
        self._free = free
        self._parked: list[Parked] = []

    @property
    def num_slabs(self) -> int:
        """Number of slabs that are parked."""
        return len(self._parked)

    @property
    def num_bytes(self) -> int:
        """Bytes that are parked: what freeing them all would give."""
        return sum(one.num_bytes for one in self._parked)

    def park(self, thread: Parked) -> None:
        """Takes over a thread; an older one that it goes on from is freed."""
        length = len(thread.token_ids)
        for one in [one for one in self._parked if one.context_id == thread.context_id]:
            if one.token_ids == thread.token_ids[: len(one.token_ids)] and len(one.token_ids) <= length:
                self._drop(one)
        self._parked.append(thread)
        while len(self._parked) > _MAX_THREADS:
            self.evict()

    def longest(self, context_id: str, token_ids: Sequence[int]) -> tuple[Slab, int] | None:
        """Returns the thread that begins most like `token_ids`, and how many rows they share; None when none does.

        The slab is there for copies that are queued before the caller awaits anything.
        """
        shared = [(_num_common(one.token_ids, token_ids), one) for one in self._parked if one.context_id == context_id]
        num_common, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        if best is None or num_common == 0:
            return None
        self._parked.remove(best)
        self._parked.append(best)
        return best.slab, num_common

    def evict(self) -> bool:
        """Frees the thread that was used longest ago; False when there is none."""
        if not self._parked:
            return False
        self._drop(self._parked[0])
        return True

    def forget(self, context_id: str) -> None:
        """Frees the threads on a context."""
        for one in [one for one in self._parked if one.context_id == context_id]:
            self._drop(one)

    def _drop(self, thread: Parked) -> None:
        self._parked.remove(thread)
        self._free(thread.slab)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))
