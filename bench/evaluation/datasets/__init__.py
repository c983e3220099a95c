"""Published benchmarks, each from a subfolder of a local folder, in the format it was published in.

    DATA/video_mme    DATA/mlvu    DATA/moviechat    DATA/vdc    DATA/vdd

Videos lie anywhere below the benchmark's own subfolder. Those that are missing are skipped, counted and named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.evaluation.datasets import mlvu, moviechat, vdc, vdd, video_mme
from bench.evaluation.datasets.base import FormatError, Loaded
from bench.evaluation.judge import Judge

LOADERS: dict[str, Callable[[Path, Judge | None], Loaded]] = {
    "video_mme": video_mme.load,
    "mlvu": mlvu.load,
    "moviechat": moviechat.load,
    "vdc": vdc.load,
    "vdd": vdd.load,
}

__all__ = ["LOADERS", "FormatError", "Loaded", "load_all"]


def load_all(folder: Path, *, limit: int | None = None, judge: Judge | None = None) -> list[Loaded]:
    """Loads the benchmarks that are in `folder`, at most `limit` questions each. Raises FormatError."""
    loaded = [LOADERS[name](folder / name, judge) for name in LOADERS if (folder / name).is_dir()]
    if not loaded:
        raise FormatError(f"{folder}: has none of the subfolders {', '.join(LOADERS)}")
    for one in loaded:
        one.items = one.items[:limit]
    return loaded
