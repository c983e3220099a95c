"""The request side of CreateContext: a spec, then the file in chunks that name their place."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from foveate.client.messages import frame_sampling
from foveate.rpc.channel import CHUNK_BYTES
from foveate.rpc.errors import FoveateError, InvalidArgument, NotFound, Unavailable, invalid
from foveate.v1 import contexts_pb2


class ContextSource:
    """What CreateContext is told. Closes its file on exit; `error` is what broke reading it (gRPC says CANCELLED)."""

    def __init__(self, spec: contexts_pb2.ContextSpec, file: BinaryIO | None = None) -> None:
        self._spec = spec
        self._file = file
        self._offset_bytes = 0
        self._is_spec_sent = False
        self._is_closed = False
        self.error: FoveateError | None = None

    def __enter__(self) -> ContextSource:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_closed = True
        if self._file is not None:
            self._file.close()

    def next_request(self) -> contexts_pb2.CreateContextRequest | None:
        """Returns the next message, or None at the end; raises FoveateError when the file cannot be read."""
        if not self._is_spec_sent:
            self._is_spec_sent = True
            return contexts_pb2.CreateContextRequest(spec=self._spec)
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
    upload = contexts_pb2.Upload(filename=path.name, total_bytes=num_bytes)
    return ContextSource(contexts_pb2.ContextSpec(upload=upload, sampling=sampling), file)


def from_bytes(data: bytes, *, filename: str, fps: float | None, max_frames: int | None) -> ContextSource:
    """Uploads bytes. Raises InvalidArgument when there are none."""
    if not data:
        raise InvalidArgument("the video has no bytes", reason="EMPTY_MEDIA")
    upload = contexts_pb2.Upload(filename=filename, total_bytes=len(data))
    spec = contexts_pb2.ContextSpec(upload=upload, sampling=frame_sampling(fps, max_frames))
    return ContextSource(spec, io.BytesIO(data))


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


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFound(f"no file at {path}", reason="FILE_NOT_FOUND", resource=("file", str(path))) from None
    except IsADirectoryError:
        raise InvalidArgument(f"{path} is a folder, not a video file", reason="NOT_A_FILE") from None
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}", reason="UNREADABLE_FILE") from None
