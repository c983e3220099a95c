"""Compiles kernels.c once per machine and source, into the user's cache, and loads it.

Without a compiler, or when anything about the cache looks wrong, `load` returns None and PyTorch's kernels are used.
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
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
)
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 60.0


@functools.cache
def load() -> ctypes.CDLL | None:
    """Returns the library, or None where it cannot be had; the log says why."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        logger.info("no C compiler found: PyTorch's kernels are used, several times slower for small models")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the native kernel cannot be used, PyTorch's are: %s", error)
        return None


def _compiled(compiler: str) -> Path:
    target = _cache_folder() / f"kernels-{_key(compiler)}.so"
    if not target.exists():
        # Several services start at once: each compiles for itself, and the last rename wins with equal content.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
            built.replace(target)
    return target


def _cache_folder() -> Path:
    """Returns a folder that only this user can write to; OSError when there is none."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "foveate"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} is writable by others")
    return folder


def _key(compiler: str) -> str:
    """Names what the binary depends on: source, flags, compiler and processor."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_TIMEOUT_S).stdout
    described = (_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version, _processor().encode())
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
