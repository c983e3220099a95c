"""A mount namespace of the suite's own: its /dev/shm and its disk can be filled, and nothing else notices."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from foveate.service_process import SHM_DIR

_MARK = "FOVEATE_CHAOS_PRIVATE"
_SHM_MIB = 192  # two pools of 64 MiB, and room for neither a third nor a fourth
_DISK_MIB = 48


def enter() -> None:
    """Runs this program again in a namespace of its own, where the kernel gives one; else returns."""
    if _MARK in os.environ:
        return
    command = _unshare()
    if command is None:
        sys.stderr.write("no mount namespace can be had here: /dev/shm and disk will not be filled\n")
        return
    os.environ[_MARK] = "1"
    os.execvp(command[0], [*command, sys.executable, "-m", "bench.chaos", *sys.argv[1:]])


def mount(disk: Path) -> bool:
    """Mounts small file systems on /dev/shm and `disk`; returns False where `enter` got no namespace."""
    if _MARK not in os.environ:
        return False
    for path, size_mib in ((SHM_DIR, _SHM_MIB), (disk, _DISK_MIB)):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=1777", "tmpfs", str(path)], check=True)
    return True


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Takes all room in a file system for the length of the block, also what others give back meanwhile."""
    filler, end = folder / "filler", threading.Event()
    file = filler.open("wb", buffering=0)

    def fill() -> None:
        while not end.is_set():
            try:
                file.write(bytes(1 << 16))
            except OSError:
                is_full.set()
                end.wait(0.05)

    is_full = threading.Event()
    filling = threading.Thread(target=fill)
    filling.start()
    try:
        is_full.wait()
        yield
    finally:
        end.set()
        filling.join()
        file.close()
        filler.unlink()


def _unshare() -> list[str] | None:
    """Returns the command that makes a namespace in which mounting is allowed."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return None
    for more in ([], ["--user", "--map-root-user"]):
        command = ["unshare", "--mount", *more]
        tried = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
        if tried.returncode == 0:
            return command
    return None
