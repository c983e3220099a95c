"""POSIX shared memory by random name, whose owner's death anybody can see.

The owner holds an exclusive flock on the file for as long as it lives; the kernel drops it on any death, SIGKILL
included. So a file that can be locked has no owner: a reader stops trusting it, and the next start of an owner
removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
import warnings
from pathlib import Path

import torch
from torch import Tensor

from engine.kv_handle import SEGMENT_NAME, SEGMENT_PREFIX, SHM_DIR, ShmSegment
from engine.kv_memory import KvNotShared, KvStale

logger = logging.getLogger(__name__)

_CREATE_TRIES = 8


def shm_namespace_id() -> str:
    """Names this process's /dev/shm: two processes with equal ids see the same files there."""
    return f"{boot_id()}-{os.stat(SHM_DIR).st_dev}"


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class OwnedSegment:
    """A segment this process created: locked, fully backed by memory, mapped for writing.

    Never unmapped by hand: tensors over it may outlive `close`, and the mapping goes with the last of them.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError with need and free space in its text when /dev/shm has no room."""
        self.path, self._fd = _create_locked()
        try:
            _reserve(self._fd, self.path, num_bytes)
            mapping = mmap.mmap(self._fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            self.unlink()
            raise
        self.memory: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)  # [num_bytes]

    def unlink(self) -> None:
        """Removes the file and the lock; the memory goes with the last mapping. May be called twice."""
        if self._fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._fd)
        self._fd = -1


class MappedSegment:
    """Another process's segment, mapped read-only: a stray write is a fault, never a corrupt cache."""

    def __init__(self, segment: ShmSegment, num_bytes: int) -> None:
        """Raises KvNotShared for another namespace or a name that is no segment of ours, KvStale when it is gone."""
        check_reachable(segment)
        try:
            self._fd = os.open(segment.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise KvStale(f"{segment.path} is gone") from error
        except OSError as error:
            raise KvNotShared(f"{segment.path} cannot be opened: {os.strerror(error.errno or 0)}") from error
        try:
            facts = os.fstat(self._fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != num_bytes:
                raise KvStale(f"{segment.path} is not a segment of {num_bytes} bytes")
            mapping = mmap.mmap(self._fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except BaseException:
            self.close()
            raise
        with warnings.catch_warnings():
            # torch warns that writing to a read-only buffer is undefined; here it is a fault, which is the point.
            warnings.simplefilter("ignore", UserWarning)
            self.memory: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)  # [num_bytes]

    def owner_is_alive(self) -> bool:
        """Tells whether the owner still holds its lock."""
        return self._fd >= 0 and not _lock(self._fd, fcntl.LOCK_SH, keep=False)

    def close(self) -> None:
        """Closes the file; the mapping goes with the last tensor over it. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_reachable(segment: ShmSegment) -> None:
    """Raises KvNotShared unless `segment` is named as ours are and lies in this process's /dev/shm."""
    folder, name = os.path.split(segment.path)
    if folder != SHM_DIR or not SEGMENT_NAME.fullmatch(name):
        raise KvNotShared(f"{segment.path!r} does not name a Foveate segment below {SHM_DIR}")
    if segment.namespace_id != shm_namespace_id():
        raise KvNotShared("the pool lies in the shared memory of another host or container")


def sweep_stale_segments() -> list[str]:
    """Removes segments whose owner died without removing them and returns their paths."""
    removed = []
    for path in Path(SHM_DIR).glob(f"{SEGMENT_PREFIX}*"):
        if SEGMENT_NAME.fullmatch(path.name) and _remove_if_ownerless(path):
            removed.append(str(path))
    if removed:
        logger.warning("removed %d shared-memory segments of dead owners", len(removed))
    return removed


def _create_locked() -> tuple[str, int]:
    for _ in range(_CREATE_TRIES):
        name = f"{SEGMENT_PREFIX}{boot_id()[:8]}-{os.getpid()}-{secrets.token_hex(8)}"
        path = os.path.join(SHM_DIR, name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # Between open and lock another process's sweep may take the file for a dead owner's: then make another one.
        if _lock(fd, fcntl.LOCK_EX, keep=True) and os.fstat(fd).st_nlink == 1:
            return path, fd
        os.close(fd)
    raise OSError(errno.EAGAIN, f"no segment could be made below {SHM_DIR}")


def _reserve(fd: int, path: str, num_bytes: int) -> None:
    # ftruncate would be sparse, and the first touch of a page that does not fit would kill the process.
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        space = os.statvfs(SHM_DIR)
        free_bytes = space.f_bavail * space.f_frsize
        raise OSError(
            errno.ENOSPC,
            f"KV pool needs {num_bytes} bytes of {SHM_DIR}, {free_bytes + os.fstat(fd).st_blocks * 512} are free; "
            "ask for a smaller pool or enlarge it (docker: --shm-size)",
            path,
        ) from None


def _remove_if_ownerless(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone by now, or another user's
        return False
    try:
        if not _lock(fd, fcntl.LOCK_EX, keep=True):
            return False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return True
    finally:
        os.close(fd)


def _lock(fd: int, kind: int, *, keep: bool) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    if not keep:
        fcntl.flock(fd, fcntl.LOCK_UN)
    return True
