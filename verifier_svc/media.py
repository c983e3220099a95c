"""Where a video's bytes come from: an upload spooled into a nameless file, or a file below the media root.

Either way the rest of the service holds one open file. Its container format is told from its first bytes, never from
its name, and the demuxer is fixed by it: no demuxer that follows references to other files or hosts can be reached.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from foveate.rpc.errors import InvalidArgument, NotFound, ResourceExhausted, invalid

if TYPE_CHECKING:
    from verifier_svc.decoders import IsolatedVideo

HASH_BLOCK_BYTES = 1024 * 1024
SNIFF_BYTES = 64
DIGEST_MISMATCH = "DIGEST_MISMATCH"
# JPEGs one behind another: frames without times.
TIMELESS_FORMAT = "mjpeg"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DISK_RETRY_S = 5.0
_MOV_FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")


@dataclass
class Media:
    """An open video file with its full-content hash; whoever holds it closes it."""

    file: IO[bytes]
    num_bytes: int
    sha256: str
    field_path: str
    # Frames per second of a file that says none itself.
    stored_fps: float | None = None
    decoder: IsolatedVideo | None = None

    def close(self) -> None:
        """Ends the decoder and closes the file; an upload's bytes are gone with it."""
        if self.decoder is not None:
            self.decoder.close()
        self.file.close()

    def read_all(self) -> bytes:
        """Returns the file's bytes, whatever its position is; blocking."""
        return os.pread(self.file.fileno(), self.num_bytes, 0)


class UploadSpool:
    """An upload on its way in: hashed while it is written to a nameless file, so that no exit can leave it behind.

    The chunks' order and the size limit are checked before a byte is written. RESOURCE_EXHAUSTED (DISK_FULL), to try
    again later, when the disk has no room; what has arrived is then of no use.
    """

    def __init__(self, *, max_bytes: int, announced_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._announced_bytes = announced_bytes
        self._check_size(announced_bytes)
        with _disk_errors():
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="foveate-upload-")  # noqa: SIM115 - finish() hands it on
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def append(self, data: bytes, write_offset: int) -> None:
        """Appends one chunk; a gap, an overlap or an over-long upload raises."""
        if write_offset != self.num_bytes:
            raise invalid("chunk.write_offset", f"is {write_offset}, but {self.num_bytes} bytes have arrived so far")
        self._check_size(self.num_bytes + len(data))
        with _disk_errors():
            self._file.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)

    def finish(self, *, expected_sha256: str = "") -> Media:
        """Hands the complete file on; the caller closes it from now on."""
        if self.num_bytes == 0:
            raise invalid("chunk.data", "the upload is empty")
        if self._announced_bytes and self._announced_bytes != self.num_bytes:
            announced, arrived = self._announced_bytes, self.num_bytes
            raise invalid("spec.upload.total_bytes", f"announced {announced} bytes, but {arrived} arrived")
        sha256 = self._digest.hexdigest()
        if expected_sha256 and expected_sha256 != sha256:
            error = invalid("spec.upload.sha256", f"announced {expected_sha256}, but bytes of {sha256} arrived")
            error.reason = DIGEST_MISMATCH
            raise error
        with _disk_errors():
            self._file.flush()
        return Media(self._file, self.num_bytes, sha256, "spec.upload")

    def discard(self) -> None:
        """Drops what has arrived."""
        with contextlib.suppress(OSError):  # closing writes what is left, for which a full disk has no room
            self._file.close()

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ResourceExhausted(
                f"the upload has {num_bytes} bytes or more; the limit is {self._max_bytes}",
                reason="UPLOAD_TOO_LARGE",
                metadata={"needed_bytes": str(num_bytes), "limit_bytes": str(self._max_bytes)},
            )


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        message = "this server's disk has no room for the upload"
        raise ResourceExhausted(message, reason="DISK_FULL", retry_after_s=_DISK_RETRY_S) from error


def spooled(data: bytes | bytearray) -> Media:
    """Returns a video file of these bytes, as an upload of them would; blocking."""
    spool = UploadSpool(max_bytes=len(data))
    try:
        spool.append(bytes(data), 0)
        return spool.finish()
    except BaseException:
        spool.discard()
        raise


def open_below_root(path: str, media_root: Path | None) -> Media:
    """Opens and hashes the regular file `path` names below `media_root`; runs in a worker thread.

    INVALID_ARGUMENT when no root is configured, the path leads outside it (`..`, absolute, symbolic links, also ones
    swapped in between check and opening), or it is no regular file. NOT_FOUND when nothing is there.
    """
    if media_root is None:
        raise invalid("spec.path", "this server has no media root; upload the file instead")
    root = media_root.resolve()
    descriptor = _open_regular(_resolve(path, root), path)
    file = os.fdopen(descriptor, "rb")
    try:
        if not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(root):
            raise _outside()
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes == 0:
            raise invalid("spec.path", "the file is empty")
        return Media(file, num_bytes, _hash_file(file), "spec.path")
    except BaseException:
        file.close()
        raise


def _resolve(path: str, root: Path) -> Path:
    if not path or "\0" in path:
        raise invalid("spec.path", "must name a file below the media root")
    try:
        target = (root / path).resolve()
    except (OSError, RuntimeError) as error:
        raise invalid("spec.path", "cannot be resolved") from error
    if not target.is_relative_to(root):
        raise _outside()
    return target


def _open_regular(target: Path, path: str) -> int:
    """Returns a descriptor of a regular file; a pipe or a device is never waited for."""
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"no file {path!r} below the media root", resource=("media", path)) from error
    except OSError as error:
        raise invalid("spec.path", "cannot be opened") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise invalid("spec.path", "is not a regular file")
    return descriptor


def _outside() -> InvalidArgument:
    return invalid("spec.path", "lies outside the media root")


def container_format(media: Media) -> str:
    """Returns the demuxer's name for the file's first bytes; INVALID_ARGUMENT when it is none that we read."""
    media.file.seek(0)
    head = media.file.read(SNIFF_BYTES)
    media.file.seek(0)
    if head[4:8] in _MOV_FIRST_BOXES:
        return "mov"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head.startswith(b"\xff\xd8\xff"):
        return TIMELESS_FORMAT
    raise not_a_video(media, "is not a video that can be read; send mp4, webm, mov, gif or JPEGs")


def check_stored_rate(media: Media, format_name: str) -> None:
    """Raises INVALID_ARGUMENT for a rate beside a file that has times of its own: only one of them can hold."""
    if media.stored_fps is not None and format_name != TIMELESS_FORMAT:
        raise invalid("spec.sampling.stored_fps", "must not be set: the file says itself when its frames are shown")


def not_a_video(media: Media, description: str) -> InvalidArgument:
    """Returns the error of a file whose content is at fault."""
    error = invalid(media.field_path, description)
    error.reason = "UNREADABLE_VIDEO"
    return error


def _hash_file(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := file.read(HASH_BLOCK_BYTES):
        digest.update(block)
    file.seek(0)
    return digest.hexdigest()
