"""The wall clocks of the services, which can be made to jump while they run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bench.chaos.shifted_clock import sitecustomize as shifted


class Clock:
    """The clock of one service's processes: started again, it has the same one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump_to(0.0)

    def jump_to(self, offset_s: float) -> None:
        """Makes the clock show `offset_s` more than the machine's, from now on."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(shifted.SECONDS.pack(offset_s))  # in place: the processes have the file mapped

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of a process that has this clock."""
        paths = [str(Path(shifted.__file__).parent), environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, paths))
        return {**environ, "PYTHONPATH": path, shifted.VARIABLE: str(self._file)}
