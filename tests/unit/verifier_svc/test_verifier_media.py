"""Uploads and paths: order, size and place are checked before bytes are believed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from foveate.rpc.errors import FoveateError, InvalidArgument, NotFound, ResourceExhausted
from verifier_svc.media import UploadSpool, open_below_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "sub").mkdir(parents=True)
    (root / "clip.mp4").write_bytes(b"clip")
    (root / "sub" / "other.mp4").write_bytes(b"other")
    (root / "inside").symlink_to(root / "sub" / "other.mp4")
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (root / "escape").symlink_to(tmp_path / "secret.mp4")
    (root / "escape-folder").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    (root / "empty.mp4").touch()
    (tmp_path / "media-evil").mkdir()
    (tmp_path / "media-evil" / "a.mp4").write_bytes(b"evil")
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.parametrize(
    ("path", "content"),
    [("clip.mp4", b"clip"), ("sub/../clip.mp4", b"clip"), ("./sub/other.mp4", b"other"), ("inside", b"other")],
)
def test_files_below_the_root(root: Path, path: str, content: bytes) -> None:
    media = open_below_root(path, root)
    assert media.file.read() == content
    assert (media.num_bytes, media.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    media.close()


@pytest.mark.parametrize(
    "path",
    [
        "../secret.mp4",
        "escape",
        "escape-folder/secret.mp4",
        "/etc/passwd",
        "../media-evil/a.mp4",
        "sub/../../secret.mp4",
        "..",
        "",
        "a\0b",
        "loop",
        "pipe",
        "sub",
        ".",
        "empty.mp4",
        "a" * 5000,
        "file:///etc/passwd",
    ],
)
def test_everything_else_is_refused(root: Path, path: str) -> None:
    with pytest.raises((InvalidArgument, NotFound)) as caught:
        open_below_root(path, root)
    assert isinstance(caught.value, NotFound) == (path == "file:///etc/passwd")


def test_a_missing_file_is_not_found(root: Path) -> None:
    with pytest.raises(NotFound) as caught:
        open_below_root("missing.mp4", root)
    assert caught.value.resource == ("media", "missing.mp4")


def test_without_a_root_no_path_is_served(root: Path) -> None:
    with pytest.raises(InvalidArgument, match="no media root"):
        open_below_root("clip.mp4", None)


def test_an_upload() -> None:
    spool = UploadSpool(max_bytes=10, announced_bytes=6)
    spool.append(b"abc", 0)
    spool.append(b"def", 3)
    media = spool.finish()
    media.file.seek(0)
    assert (media.file.read(), media.sha256) == (b"abcdef", hashlib.sha256(b"abcdef").hexdigest())
    assert not isinstance(media.file.name, str)  # the file has no name that could be left behind
    media.close()


@contextlib.contextmanager
def disk_that_ends_at(num_bytes: int) -> Iterator[None]:
    """Files of this process may grow to `num_bytes`: the kernel's own refusal, at no cost for anything else."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100, 1 << 20])  # refused by the last flush, and by a write
def test_a_full_disk_is_said_and_passes(size: int) -> None:
    def upload() -> None:
        spool = UploadSpool(max_bytes=1 << 21)
        try:
            spool.append(bytes(size), 0)
            spool.finish().close()
        finally:
            spool.discard()

    with disk_that_ends_at(50), pytest.raises(ResourceExhausted) as caught:
        upload()
    assert (caught.value.reason, bool(caught.value.retry_after_s)) == ("DISK_FULL", True)
    upload()


def bad_uploads() -> list[tuple[type[FoveateError], int, int, list[tuple[bytes, int]]]]:
    return [
        (InvalidArgument, 10, 0, []),
        (InvalidArgument, 10, 0, [(b"", 0)]),
        (InvalidArgument, 10, 0, [(b"abc", 0), (b"d", 4)]),
        (InvalidArgument, 10, 0, [(b"abc", 0), (b"d", 2)]),
        (InvalidArgument, 10, 0, [(b"abc", 1)]),
        (InvalidArgument, 10, 5, [(b"abc", 0)]),
        (ResourceExhausted, 10, 0, [(b"abcdefgh", 0), (b"ijk", 8)]),
        (ResourceExhausted, 10, 4 << 30, []),
    ]


@pytest.mark.parametrize(("kind", "limit", "announced", "chunks"), bad_uploads())
def test_bad_uploads(kind: type[FoveateError], limit: int, announced: int, chunks: list[tuple[bytes, int]]) -> None:
    def upload() -> None:
        spool = UploadSpool(max_bytes=limit, announced_bytes=announced)
        try:
            for data, offset in chunks:
                spool.append(data, offset)
            spool.finish()
        finally:
            spool.discard()

    with pytest.raises(kind):
        upload()
