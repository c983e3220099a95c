"""Progress on stderr while a video becomes a context; silent where stderr is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from foveate.cli.output import Output
from foveate.client import Progress as StageProgress
from foveate.client import ProgressCallback, Stage

_LABELS = {
    Stage.UPLOAD: "upload (bytes)",
    Stage.DECODE: "decode (frames)",
    Stage.ENCODE: "encode (frames)",
    Stage.PREFILL: "prefill (tokens)",
}


@contextlib.contextmanager
def context_progress(output: Output) -> Iterator[ProgressCallback]:
    """Yields what to give `create_context` as `on_progress`; the bars vanish at the end of the block."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    tasks: dict[Stage, TaskID] = {}
    with Progress(*columns, console=output.err, transient=True, disable=not output.err.is_terminal) as bars:

        def on_progress(progress: StageProgress) -> None:
            total = progress.total or None
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(_LABELS[progress.stage], total=total)
            bars.update(tasks[progress.stage], completed=progress.done, total=total)

        yield on_progress
