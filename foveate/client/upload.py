"""The request side of CreateContext: a spec, then the file in chunks that name their place."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from foveate.client.messages import frame_sampling
from foveate.client.types import Progress, Stage
from foveate.rpc.channel import CHUNK_BYTES
from foveate.rpc.errors import FoveateError, InvalidArgument, NotFound, Unavailable, invalid
from foveate.v1 import contexts_pb2

_LISTEN_S = 30.0


class ContextSource:
    """What CreateContext is told. Closes its file on exit; `error` is what broke reading it (gRPC says CANCELLED)."""

    def __init__(self, spec: contexts_pb2.ContextSpec, file: BinaryIO | None = None) -> None:
        self._spec = spec
        self._file = file
        self._offset_bytes = 0
        self._is_spec_sent = False
        self._is_closed = False
        self._where_to_go_on: threading.Event | None = None  # set once the server has said it
        self.error: FoveateError | None = None

    def __enter__(self) -> ContextSource:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_closed = True
        if self._where_to_go_on is not None:
            self._where_to_go_on.set()
        if self._file is not None:
            self._file.close()

    def next_request(self) -> contexts_pb2.CreateContextRequest | None:
        """Returns the next message, or None at the end; raises FoveateError when the file cannot be read."""
        if not self._is_spec_sent:
            self._is_spec_sent = True
            return contexts_pb2.CreateContextRequest(spec=self._spec)
        if self._where_to_go_on is not None and not self._where_to_go_on.wait(_LISTEN_S):
            raise Unavailable("the server does not say where the upload goes on", reason="UPLOAD_NOT_RESUMED")
        data = self._read()
        if not data:
            return None
        chunk = contexts_pb2.MediaChunk(write_offset=self._offset_bytes, data=data)
        self._offset_bytes += len(data)
        return contexts_pb2.CreateContextRequest(chunk=chunk)

    def rewind(self) -> None:
        """Starts over with the first message."""
        self._offset_bytes, self._is_spec_sent = 0, False
        if self._file is not None:
            self._file.seek(0)

    def name_request(self, request_id: str | None) -> None:
        """Gives the request an id of the caller's, under which it can be watched and sent again."""
        if request_id is not None:
            self._spec.request_id = request_id

    @property
    def can_resume(self) -> bool:
        """Whether the server keeps what has arrived when the connection breaks."""
        return self._file is not None and bool(self._spec.request_id)

    def resume(self) -> None:
        """Starts over with the first message, and goes on from where the server says."""
        self.rewind()
        self._where_to_go_on = threading.Event()

    def heard(self, progress: Progress) -> None:
        """Takes note of progress: the first of a resumed upload is where it goes on."""
        if self._where_to_go_on is None or self._where_to_go_on.is_set() or progress.stage is not Stage.UPLOAD:
            return
        if self._file is not None:
            self._file.seek(progress.done)
        self._offset_bytes = progress.done
        self._where_to_go_on.set()

    def requests(self) -> Iterator[contexts_pb2.CreateContextRequest]:
        """Yields all messages; gRPC's sync API runs this in a thread of its own, maybe beyond the end of the call."""
        while not self._is_closed and (request := self.next_request()) is not None:
            yield request

    def _read(self) -> bytes:
        if self._file is None:
            return b""
        try:
            return self._file.read(CHUNK_BYTES)
        except ValueError:  # the call ended early and the file was closed under its upload thread
            return b""
        except OSError as error:
            self.error = Unavailable(f"reading the video failed: {error.strerror}", reason="READ_FAILED")
            raise self.error from error


def from_file(path: str | os.PathLike[str], *, fps: float | None, max_frames: int | None) -> ContextSource:
    """Opens a local file for upload.

    Raises NotFound when there is none, InvalidArgument when it is empty, a folder or not readable.
    """
    path = Path(path)
    sampling = frame_sampling(fps, max_frames)
    file = _open(path)
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes == 0:
        file.close()
        raise InvalidArgument(f"{path} is empty", reason="EMPTY_MEDIA")
    return _upload(file, path.name, num_bytes, sampling)


def from_bytes(
    data: bytes, *, filename: str, fps: float | None, max_frames: int | None, stored_fps: float | None = None
) -> ContextSource:
    """Uploads bytes. Raises InvalidArgument when there are none."""
    if not data:
        raise InvalidArgument("the video has no bytes", reason="EMPTY_MEDIA")
    return _upload(io.BytesIO(data), filename, len(data), frame_sampling(fps, max_frames, stored_fps))


def from_server_path(path: str, *, fps: float | None, max_frames: int | None) -> ContextSource:
    """Names a file below the server's media root; nothing is uploaded."""
    return ContextSource(contexts_pb2.ContextSpec(path=path, sampling=frame_sampling(fps, max_frames)))


def from_path_or_server_path(
    path: str | os.PathLike[str] | None, server_path: str | None, *, fps: float | None, max_frames: int | None
) -> ContextSource:
    """Returns the source of whichever is given; exactly one must be."""
    if path is not None and server_path is None:
        return from_file(path, fps=fps, max_frames=max_frames)
    if server_path is not None and path is None:
        return from_server_path(server_path, fps=fps, max_frames=max_frames)
    raise invalid("path", "give either a local path or server_path")


def _upload(file: BinaryIO, filename: str, num_bytes: int, sampling: contexts_pb2.FrameSampling) -> ContextSource:
    """Uploads of several chunks can be resumed, and are checked against their digest."""
    upload = contexts_pb2.Upload(filename=filename, total_bytes=num_bytes)
    spec = contexts_pb2.ContextSpec(upload=upload, sampling=sampling)
    if num_bytes > CHUNK_BYTES:
        spec.upload.sha256 = _sha256(file)
        file.seek(0)
        spec.request_id = uuid.uuid4().hex
    return ContextSource(spec, file)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(CHUNK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFound(f"no file at {path}", reason="FILE_NOT_FOUND", resource=("file", str(path))) from None
    except IsADirectoryError:
        raise InvalidArgument(f"{path} is a folder, not a video file", reason="NOT_A_FILE") from None
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}", reason="UNREADABLE_FILE") from None
