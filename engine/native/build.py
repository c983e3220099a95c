"""Compiles step.c once per machine and source, into a cache folder, and loads it.

Without a compiler, or when anything about the folder looks wrong, `load` returns None and PyTorch's kernels are used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "step.c"
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
)
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 60.0


def user_cache(environment: Mapping[str, str]) -> Path | None:
    """Returns where a user's environment says that caches belong; None when it says nothing."""
    if root := environment.get("XDG_CACHE_HOME"):
        return Path(root) / "foveate"
    home = environment.get("HOME")
    return Path(home) / ".cache" / "foveate" if home else None


@functools.cache
def load(folder: Path) -> ctypes.CDLL | None:
    """Returns the library, compiled into `folder` if need be, or None where it cannot be had; the log says why."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        logger.info("no C compiler found: PyTorch's kernels are used, several times slower for small models")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, folder)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the native kernel cannot be used, PyTorch's are: %s", error)
        return None


def _compiled(compiler: str, folder: Path) -> Path:
    _make_private(folder)
    target = folder / f"kernels-{_key(compiler)}.so"
    if not target.exists():
        # Several services start at once: each compiles for itself, and the last rename wins with equal content.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / target.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
            built.replace(target)
    return target


def _make_private(folder: Path) -> None:
    """Makes the folder if need be; OSError when others can write to it, for what lies in it is run."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} is writable by others")


def _key(compiler: str) -> str:
    """Names what the binary depends on: source, flags, compiler and processor."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_TIMEOUT_S).stdout
    sources = (path.read_bytes() for path in sorted(_FOLDER.glob("*.[ch]")))
    described = (*sources, " ".join(_FLAGS).encode(), version, _processor().encode())
    digest = hashlib.sha256()
    for part in described:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
