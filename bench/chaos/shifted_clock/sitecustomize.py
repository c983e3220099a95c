"""Python imports this at its start, when this folder is on PYTHONPATH: the wall clock of the process can be shifted.

FOVEATE_CHAOS_CLOCK names a file of one number, the seconds that are added; whoever writes it makes the clock jump. The
monotonic clock stays what it is, as it does when a machine's clock is set. Nothing of Foveate knows of this.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

VARIABLE = "FOVEATE_CHAOS_CLOCK"
SECONDS = struct.Struct("<d")


def shift(path: Path) -> None:
    """Makes time.time and time.time_ns follow the file."""
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), SECONDS.size, prot=mmap.PROT_READ)
    real_time, real_time_ns = time.time, time.time_ns
    time.time = lambda: real_time() + SECONDS.unpack_from(view)[0]
    time.time_ns = lambda: real_time_ns() + int(SECONDS.unpack_from(view)[0] * 1e9)


if VARIABLE in os.environ:
    shift(Path(os.environ[VARIABLE]))
