"""Which bytes of a pool are taken: best-fit allocation over coalescing free ranges, without any memory of its own."""

from __future__ import annotations

from bisect import bisect_left, insort


class PoolFull(Exception):
    """No free range is large enough. Says what was needed, what is free in all, and the size of the whole."""

    def __init__(self, *, needed_bytes: int, free_bytes: int, total_bytes: int) -> None:
        super().__init__(f"KV pool is full: need {needed_bytes} bytes, {free_bytes} of {total_bytes} bytes are free")
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes


class FreeList:
    """Ranges of [start_bytes, end_bytes): free ones sorted by offset and never touching, taken ones by offset."""

    def __init__(self, start_bytes: int, end_bytes: int, *, align_bytes: int) -> None:
        self._start, self._end, self._align = start_bytes, end_bytes - end_bytes % align_bytes, align_bytes
        if self._start % align_bytes or self._start >= self._end:
            raise ValueError(f"range {start_bytes}..{end_bytes} has no room aligned to {align_bytes} bytes")
        self._free: list[tuple[int, int]] = [(self._start, self._end)]
        self._taken: dict[int, int] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes under management."""
        return self._end - self._start

    @property
    def used_bytes(self) -> int:
        """Bytes taken, alignment included."""
        return sum(self._taken.values())

    @property
    def num_taken(self) -> int:
        """Number of taken ranges."""
        return len(self._taken)

    def allocate(self, num_bytes: int) -> int:
        """Takes the smallest free range that fits and returns its offset; raises PoolFull."""
        need = max(1, -(-num_bytes // self._align)) * self._align
        fitting = [(end - start, start) for start, end in self._free if end - start >= need]
        if not fitting:
            free_bytes = self.total_bytes - self.used_bytes
            raise PoolFull(needed_bytes=need, free_bytes=free_bytes, total_bytes=self.total_bytes)
        size, start = min(fitting)
        self._free.remove((start, start + size))
        if size > need:
            insort(self._free, (start + need, start + size))
        self._taken[start] = need
        return start

    def release(self, start: int) -> None:
        """Gives a taken range back and joins it with free neighbours; ValueError when nothing is taken at `start`."""
        if start not in self._taken:
            raise ValueError(f"no range is taken at offset {start}")
        end = start + self._taken.pop(start)
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
        insort(self._free, (start, end))

    def taken_bytes(self, start: int) -> int:
        """Bytes of the range taken at `start`; ValueError when none is."""
        if start not in self._taken:
            raise ValueError(f"no range is taken at offset {start}")
        return self._taken[start]

    def check_integrity(self) -> None:
        """Asserts that free and taken ranges tile the whole without overlap and that no two free ranges touch."""
        taken = [(start, start + size, "taken") for start, size in self._taken.items()]
        ranges = sorted([*taken, *((start, end, "free") for start, end in self._free)])
        position, previous = self._start, "taken"
        for start, end, kind in ranges:
            assert start == position, f"range at {start} leaves a gap or overlaps at {position}"
            assert end > start, f"empty range at {start}"
            assert not (kind == previous == "free"), f"free ranges touch at {start}"
            assert start % self._align == 0, f"range at {start} is not aligned"
            position, previous = end, kind
        assert position == self._end, f"ranges end at {position}, not at {self._end}"
