"""Cosines and sines of text positions, made a page at a time: an answer stays on a page or two, and angles are dear."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.positions import text_positions

_PAGE = 512
_MAX_PAGES = 64


class Rotations:
    """Pages of text positions. One thread at a time."""

    def __init__(self, half_rotation: Callable[[Tensor], tuple[Tensor, Tensor]], *, max_rows: int) -> None:
        """`half_rotation` maps positions int64 [3, n] to float32 [n, head_dim / 2], twice; steps have max_rows rows."""
        self._half_rotation, self._max_rows = half_rotation, max_rows
        self._page = functools.lru_cache(maxsize=_MAX_PAGES)(self._make_page)

    def pointers(self, position: int, num_rows: int, kept: list[Any]) -> tuple[int, int]:
        """Returns where cosines and sines of `num_rows` positions lie, each [num_rows, head_dim / 2].

        They lie there as long as `kept` does.
        """
        assert num_rows <= self._max_rows
        page = cosines, sines = self._page(position // _PAGE)
        kept.append(page)
        offset = position % _PAGE * cosines.stride(0) * cosines.itemsize
        return cosines.data_ptr() + offset, sines.data_ptr() + offset

    def _make_page(self, index: int) -> tuple[Tensor, Tensor]:
        # Pages overlap, so that the rows of a step lie on one.
        cosines, sines = self._half_rotation(text_positions(index * _PAGE, _PAGE + self._max_rows))
        return cosines.contiguous(), sines.contiguous()
