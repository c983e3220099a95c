"""Three pictures: speed against fidelity, T against lambda, acceptance per position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

from bench.evaluation.summary import Summary

matplotlib.use("Agg")


def speed_against_fidelity(summaries: Sequence[Summary], path: Path) -> None:
    """One point a method; to the right is faster, up is truer."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for one in summaries:
        low, high = one.fidelity_interval
        error = [[max(0.0, one.fidelity - low)], [max(0.0, high - one.fidelity)]]
        axes.errorbar(one.decode_speedup, one.fidelity, yerr=error, fmt="o", capsize=2)
        axes.annotate(one.method, (one.decode_speedup, one.fidelity), textcoords="offset points", xytext=(5, 4))
    axes.axhline(1, color="gray", linewidth=0.8)
    _finish(axes, "decoding speed over plain decoding", "facts right, over the target's own")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def t_against_lambda(
    measured: Mapping[float, float],
    expected: Mapping[float, float],
    with_correlation: Mapping[float, float],
    path: Path,
) -> None:
    """T by lambda: measured, by the mismatch rate alone, and by the measured rate of strict mismatches."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(list(measured), list(measured.values()), "o", label="measured")
    axes.plot(list(expected), list(expected.values()), "-", label="independent mismatches")
    axes.plot(list(with_correlation), list(with_correlation.values()), "--", label="same rounds, cut anew")
    axes.legend()
    _finish(axes, "lambda: share of draft tokens that need not match", "T: accepted draft tokens a round")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def acceptance_per_position(summaries: Sequence[Summary], path: Path) -> None:
    """How often each draft position is accepted."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for one in summaries:
        axes.plot(range(1, len(one.acceptance_per_pos) + 1), one.acceptance_per_pos, "o-", label=one.method)
    axes.legend()
    axes.set_ylim(0, 1.02)
    _finish(axes, "position in the draft", "share of rounds that accept it")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
