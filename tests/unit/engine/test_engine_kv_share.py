"""Two processes, one pool: what a reader sees, what it cannot do, how it learns that the owner is gone (case K3)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import shm
from engine.handle_proto import handle_from_proto, handle_to_proto
from engine.kv_handle import CudaIpcSegment, PoolHandle, ShmSegment
from engine.kv_pool import KvPool
from engine.kv_share import KvNotShared, KvStale, MappedPool, shm_namespace_id
from foveate.v1 import kv_pb2
from tests.unit.engine.shm_peers import LAYOUT, SLAB

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def peers() -> Iterator[list[int]]:
    """Process ids of this test; none of them leaves a segment (those of other programs are not ours to count)."""
    process_ids = [os.getpid()]
    yield process_ids
    names = [path.name for path in Path("/dev/shm").glob("foveate-*")]
    assert [name for name in names for process_id in process_ids if f"-{process_id}-" in name] == []


def start_peer(role: str, peers: list[int]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.engine.shm_peers", role],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    peers.append(process.pid)
    return process


@contextlib.contextmanager
def owner_process(peers: list[int]) -> Iterator[tuple[subprocess.Popen[str], PoolHandle]]:
    process = start_peer("owner", peers)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        yield process, handle_from_proto(kv_pb2.KvHandle.FromString(bytes.fromhex(line)))
    finally:
        process.kill()
        process.communicate()
        shm.sweep_stale_segments()


def tell(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.fixture
def pool(peers: list[int]) -> Iterator[KvPool]:
    made = KvPool.create(LAYOUT, pool_bytes=1 << 20, device=CPU, model_fingerprint="f" * 32)
    yield made
    made.close()


def test_reader_sees_writes_then_close_then_nothing_new(peers: list[int]) -> None:
    with owner_process(peers) as (process, handle):
        mapped = MappedPool.attach(handle, device=CPU)
        keys, values = mapped.views(SLAB)
        assert keys.unique().tolist() == [3.0]
        assert values.unique().tolist() == [4.0]
        assert tell(process, "7.5") == "written"
        assert keys.unique().tolist() == [7.5]
        mapped.check()
        assert tell(process, "close") == "closed"
        with pytest.raises(KvStale, match="closed by its owner"):
            mapped.check()
        with pytest.raises(KvStale, match="is gone"):
            MappedPool.attach(handle, device=CPU)
        mapped.close()
        assert keys.unique().tolist() == [7.5]  # views outlive the mapping's name


def test_killed_owner_is_noticed_and_swept_by_the_next_start(peers: list[int]) -> None:
    with owner_process(peers) as (process, handle):
        assert isinstance(handle.segment, ShmSegment)
        path = Path(handle.segment.path)
        mapped = MappedPool.attach(handle, device=CPU)
        mapped.check()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path.exists()
        with pytest.raises(KvStale, match="owned the pool is gone"):
            mapped.check()
        with pytest.raises(KvStale, match="owned the pool is gone"):
            MappedPool.attach(handle, device=CPU)
        KvPool.create(LAYOUT, pool_bytes=1 << 20, device=CPU, model_fingerprint="f" * 32).close()
        assert not path.exists()


@pytest.mark.parametrize(("role", "code"), [("reader", 0), ("stray-writer", -signal.SIGSEGV)])
def test_a_reader_cannot_write(pool: KvPool, peers: list[int], role: str, code: int) -> None:
    keys, values = pool.views(pool.allocate(SLAB.capacity))
    keys.fill_(1.0)
    values.fill_(2.0)
    process = start_peer(role, peers)
    out, _ = process.communicate(handle_to_proto(pool.handle).SerializeToString().hex() + "\n", timeout=60)
    assert out.split() == ["1.0", "2.0"]
    assert process.returncode == code
    assert keys.unique().tolist() == [1.0]


def test_other_epoch_or_model_is_stale(pool: KvPool) -> None:
    for handle in (
        dataclasses.replace(pool.handle, epoch=pool.handle.epoch + 2),
        dataclasses.replace(pool.handle, model_fingerprint="e" * 32),
        dataclasses.replace(pool.handle, layout=dataclasses.replace(LAYOUT, num_layers=1)),
        dataclasses.replace(pool.handle, pool_bytes=1 << 19),
    ):
        with pytest.raises(KvStale):
            MappedPool.attach(handle, device=CPU)


def test_other_namespace_is_not_shared(pool: KvPool) -> None:
    assert isinstance(pool.handle.segment, ShmSegment)
    elsewhere = ShmSegment(pool.handle.segment.path, "another-boot-21")
    with pytest.raises(KvNotShared, match="another host"):
        MappedPool.attach(dataclasses.replace(pool.handle, segment=elsewhere), device=CPU)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/dev/shm/../../etc/passwd", "/dev/shm/other", "foveate-00000000-1-0000000000000000", ""]
)
def test_paths_that_are_no_segments_are_never_opened(pool: KvPool, path: str) -> None:
    segment = ShmSegment(path, shm_namespace_id())
    with pytest.raises(KvNotShared, match="does not name"):
        MappedPool.attach(dataclasses.replace(pool.handle, segment=segment), device=CPU)


def test_links_are_not_followed(pool: KvPool, tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_bytes(b"x" * pool.pool_bytes)
    link = Path(f"/dev/shm/foveate-{shm.boot_id()[:8]}-1-{'a' * 16}")
    os.symlink(target, link)
    try:
        segment = ShmSegment(str(link), shm_namespace_id())
        with pytest.raises(KvNotShared, match="cannot be opened"):
            MappedPool.attach(dataclasses.replace(pool.handle, segment=segment), device=CPU)
    finally:
        link.unlink()


def test_devices_must_match(pool: KvPool) -> None:
    cuda = dataclasses.replace(pool.handle, segment=CudaIpcSegment("GPU-0", bytes(64), 0))
    with pytest.raises(KvNotShared, match="cannot be read from cpu"):
        MappedPool.attach(cuda, device=CPU)
    with pytest.raises(KvNotShared, match="cannot be read from cuda"):
        MappedPool.attach(pool.handle, device=torch.device("cuda", 0))


def test_attaching_many_times_leaks_no_files(pool: KvPool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(500):
        MappedPool.attach(pool.handle, device=CPU).close()
    assert len(os.listdir("/proc/self/fd")) == before
