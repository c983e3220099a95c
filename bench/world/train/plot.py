"""A picture of a run's curve."""

import json
from collections import defaultdict
from pathlib import Path

UNDRAWN = {"step", "elapsed_s", "num_videos", "num_pairs"}


def read_curve(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of every quantity in a curve.jsonl."""
    series: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    for line in path.read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name not in UNDRAWN:
                steps, values = series[name]
                steps.append(record["step"])
                values.append(value)
    return dict(series)


def plot_curve(curve: Path, picture: Path) -> None:
    """Losses on the left; on the right the shares between 0 and 1: accuracies and validation scores."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, shares = figure.subplots(1, 2)
    for name, (steps, values) in read_curve(curve).items():
        is_share = name.startswith("validation ") or name in ("color", "shape", "size", "motion", "background")
        axes = shares if is_share else losses
        axes.plot(steps, values, label=name, marker="o" if name.startswith("validation ") else None, markersize=3)
    losses.set_yscale("log")
    losses.set_title("losses")
    shares.set_title("right answers")
    shares.set_ylim(0, 1.02)
    for axes in (losses, shares):
        axes.set_xlabel("step")
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(picture, dpi=110)
