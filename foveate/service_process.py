"""One service as a child process: started, awaited until it says READY, and stopped without leaving anything."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from foveate.rpc.errors import Unavailable

SHM_DIR = Path("/dev/shm")
_POLL_S = 0.02
_TAIL_LINES = 8


class StackError(Unavailable):
    """A service of the local stack did not start, or died; the message ends with the last lines of its log."""

    default_reason = "STACK_FAILED"


class ServiceProcess:
    """A running `python -m MODULE`. Its output goes to files in `directory`, its temporary files to a folder there.

    It has a session of its own: Ctrl-C in a terminal reaches the parent only, which then stops the services in order.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        directory: Path,
        environ: Mapping[str, str],
        scratch: Path | None = None,
    ) -> None:
        """`scratch` is a folder for temporary files that others may use as well."""
        self.name = name
        self._out_path = directory / f"{name}.out"
        self.log_path = directory / f"{name}.log"
        if scratch is None:
            scratch = directory / f"{name}.tmp"
            scratch.mkdir()
        command = [sys.executable, "-m", "foveate.child", module, *arguments]
        with self._out_path.open("wb") as out, self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # held open, never written to: see foveate.child
                stdout=out,
                stderr=log,
                env={**environ, "TMPDIR": str(scratch)},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def wait_ready(self, deadline_s: float) -> int:
        """Waits for READY until `deadline_s` on time.monotonic's clock; returns the port. Raises StackError."""
        while (port := self._ready_port()) is None:
            self.check()
            if time.monotonic() > deadline_s:
                raise StackError(f"{self.name} was not ready in time{self.log_tail()}", reason="STACK_START_TIMEOUT")
            time.sleep(_POLL_S)
        return port

    def check(self) -> None:
        """Raises StackError when the process is gone."""
        code = self._process.poll()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            raise StackError(f"{self.name} {how}{self.log_tail()}")

    def log_tail(self) -> str:
        """Returns ": " and the last lines of the log, or nothing when there are none."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 8192))
            lines = log.read().decode(errors="replace").splitlines()
        return ": " + "\n".join(lines[-_TAIL_LINES:]) if lines else ""

    def pin(self, cpus: Sequence[int]) -> None:
        """Restricts the process, and the threads it will start, to `cpus`."""
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(self.pid, cpus)

    def stop(self, grace_s: float) -> None:
        """Asks the process to end, kills it after `grace_s` seconds, removes the shared memory it left. Idempotent."""
        if self.is_alive:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        _remove_segments(self.pid)

    def _ready_port(self) -> int | None:
        match = re.search(rb"^READY (\d+)$", self._out_path.read_bytes(), re.MULTILINE)
        return int(match[1]) if match else None


def _remove_segments(pid: int) -> None:
    # Only what carries the dead child's pid, and only when nobody holds the owner's lock (engine/shm.py).
    for path in SHM_DIR.glob(f"foveate-*-{pid}-*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
