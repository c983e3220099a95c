"""The chaos suite's clocks: a process's wall clock jumps while it runs, its monotonic one does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from bench.chaos.clocks import Clock

_TELL = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.time_ns() / 1e9, time.monotonic(), flush=True)"


def test_a_clock_jumps_under_a_running_process(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    process = subprocess.Popen(
        [sys.executable, "-c", _TELL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clock.environment(os.environ),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        for offset_s in (0.0, 3600.0, -3600.0, 0.0):
            clock.jump_to(offset_s)
            process.stdin.write("\n")
            process.stdin.flush()
            wall, wall_ns, monotonic = map(float, process.stdout.readline().split())
            assert abs(wall - time.time() - offset_s) < 5
            assert abs(wall_ns - wall) < 5
            assert 0 <= time.monotonic() - monotonic < 5
        process.stdin.close()
