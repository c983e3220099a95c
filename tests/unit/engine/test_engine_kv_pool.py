"""The owner's side: allocation never overlaps, slabs read zeros, nothing is left behind."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import shm
from engine.cuda_ipc import refuse_expandable_segments
from engine.free_list import FreeList
from engine.handle_proto import (
    handle_from_proto,
    handle_to_proto,
    selection_from_proto,
    selection_to_proto,
    slab_from_proto,
    slab_to_proto,
)
from engine.kv_handle import CudaIpcSegment, ShmSegment
from engine.kv_pool import KvPool, PoolFull, PoolHandle, SelectionSlab, Slab
from engine.layout import KvLayout
from foveate.v1 import kv_pb2

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.fixture
def pool() -> Iterator[KvPool]:
    made = KvPool.create(LAYOUT, pool_bytes=1 << 20, device=CPU, model_fingerprint="f" * 32)
    yield made
    made.close()


def segment_path(pool: KvPool) -> str:
    assert isinstance(pool.handle.segment, ShmSegment)
    return pool.handle.segment.path


def check_full(ranges: FreeList, free_bytes: int, needed_bytes: int, asked_bytes: int) -> None:
    assert needed_bytes >= asked_bytes
    assert free_bytes + ranges.used_bytes == ranges.total_bytes == 4096 * 39


@given(st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 10)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_ranges_never_overlap_and_all_come_back(steps: list[tuple[int, int]]) -> None:
    ranges = FreeList(4096, 4096 * 40 + 17, align_bytes=4096)
    taken: dict[int, int] = {}
    for num_bytes, which in steps:
        if num_bytes % 3 == 0 and taken:
            start = sorted(taken)[which % len(taken)]
            ranges.release(start)
            del taken[start]
        else:
            try:
                start = ranges.allocate(num_bytes)
            except PoolFull as full:
                check_full(ranges, full.free_bytes, full.needed_bytes, num_bytes)
                continue
            assert start not in taken
            taken[start] = num_bytes
        ranges.check_integrity()
        assert ranges.num_taken == len(taken)
        for start, size in taken.items():
            assert start % 4096 == 0
            assert ranges.taken_bytes(start) >= size
    for start in taken:
        ranges.release(start)
    ranges.check_integrity()
    assert ranges.allocate(4096 * 39) == 4096  # one free range again


def test_best_fit_takes_the_smallest_hole() -> None:
    ranges = FreeList(0, 4096 * 10, align_bytes=4096)
    starts = [ranges.allocate(4096 * size) for size in (3, 1, 1, 1, 4)]
    ranges.release(starts[0])
    ranges.release(starts[2])
    assert ranges.allocate(10) == starts[2]


def test_slabs_are_shaped_zeroed_and_separate(pool: KvPool) -> None:
    first, second = pool.allocate(37), pool.allocate(5)
    keys, values = pool.views(first)
    assert keys.shape == values.shape == (3, 2, 37, 16)
    keys.fill_(1.0)
    values.fill_(2.0)
    for view in pool.views(second):
        assert view.abs().sum() == 0
    pool.free(first)
    again = pool.allocate(37)
    assert again.offset_bytes == first.offset_bytes
    for view in pool.views(again):
        assert view.abs().sum() == 0
    chosen = pool.allocate_selection(9)
    pool.selection_view(chosen).copy_(torch.arange(9))
    assert pool.selection_view(chosen)[2, 1].tolist() == list(range(9))
    assert pool.selection_view(chosen).dtype == torch.int32
    assert pool.num_slabs == 3
    pool.check_integrity()


def test_full_pool_says_what_is_needed_and_recovers(pool: KvPool) -> None:
    slabs = [pool.allocate(100) for _ in range(13)]
    with pytest.raises(PoolFull) as full:
        pool.allocate(100)
    assert full.value.needed_bytes >= LAYOUT.slab_bytes(100)
    assert full.value.free_bytes < full.value.needed_bytes
    assert full.value.total_bytes == pool.pool_bytes - 4096
    for slab in slabs:
        pool.free(slab)
    assert pool.used_bytes == pool.num_slabs == 0
    pool.check_integrity()


def test_double_free_is_a_bug_that_shows(pool: KvPool) -> None:
    slab = pool.allocate(3)
    pool.free(slab)
    with pytest.raises(ValueError, match="no range is taken"):
        pool.free(slab)


def test_empty_selection_has_a_place(pool: KvPool) -> None:
    slab = pool.allocate_selection(0)
    assert pool.selection_view(slab).shape == (3, 2, 0)
    pool.free(slab)


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(pool: KvPool, capacity: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pool.allocate(capacity)


@pytest.mark.parametrize(
    "slab", [Slab(0, 1), Slab(4096, 10_000_000), Slab(1 << 20, 1), Slab(4100, 1), Slab(1 << 40, 1)]
)
def test_views_outside_the_pool_are_refused(pool: KvPool, slab: Slab) -> None:
    with pytest.raises(ValueError, match="does not lie"):
        pool.views(slab)


def test_the_segment_is_private_named_by_us_and_gone_after_close() -> None:
    pool = KvPool.create(LAYOUT, pool_bytes=1 << 20, device=CPU, model_fingerprint="f" * 32)
    path = Path(segment_path(pool))
    assert re.fullmatch(r"/dev/shm/foveate-[0-9a-f]{8}-\d+-[0-9a-f]{16}", str(path))
    facts = path.stat()
    assert facts.st_mode & 0o777 == 0o600
    assert facts.st_size == 1 << 20
    assert facts.st_blocks * 512 >= 1 << 20  # backed by memory, not sparse
    keys, _ = pool.views(pool.allocate(3))
    pool.close()
    pool.close()
    assert not path.exists()
    assert keys.sum() == 0  # still mapped for those who hold a view


def test_sweep_spares_living_owners(pool: KvPool) -> None:
    dead = Path(f"/dev/shm/foveate-{shm.boot_id()[:8]}-{os.getpid()}-{'0' * 16}")
    stranger = Path("/dev/shm/foveate-notes.txt")
    try:
        dead.write_bytes(b"x")
        stranger.write_bytes(b"x")
        removed = shm.sweep_stale_segments()
        assert str(dead) in removed
        assert not dead.exists()
        assert stranger.exists()
        assert Path(segment_path(pool)).exists()
    finally:
        dead.unlink(missing_ok=True)
        stranger.unlink(missing_ok=True)


def test_no_room_in_shared_memory_is_said_in_numbers() -> None:
    too_much = 1 << 50
    with pytest.raises(OSError, match=rf"needs {too_much} bytes .* are free") as error:
        KvPool.create(LAYOUT, pool_bytes=too_much, device=CPU, model_fingerprint="f" * 32)
    assert error.value.errno == errno.ENOSPC
    assert list(Path("/dev/shm").glob(f"foveate-*-{os.getpid()}-*")) == []


def test_a_pool_needs_room_for_a_slab() -> None:
    with pytest.raises(ValueError, match="pool_bytes"):
        KvPool.create(LAYOUT, pool_bytes=4096, device=CPU, model_fingerprint="f" * 32)


def test_handles_and_slabs_cross_as_messages(pool: KvPool) -> None:
    assert handle_from_proto(handle_to_proto(pool.handle)) == pool.handle
    cuda = PoolHandle("id", 7, 99, CudaIpcSegment("GPU-1", bytes(range(64)), 512), LAYOUT, "f")
    assert handle_from_proto(handle_to_proto(cuda)) == cuda
    assert slab_from_proto(slab_to_proto(Slab(4096, 7))) == Slab(4096, 7)
    assert selection_from_proto(selection_to_proto(SelectionSlab(4096, 0))) == SelectionSlab(4096, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"pool_id": ""}, "pool_id"),
        ({"num_layers": 0}, "num_layers"),
        ({"shm": None}, "transport"),
        ({"cuda_ipc": kv_pb2.CudaIpcSegment(mem_handle=b"short")}, "cuda_ipc.mem_handle"),
    ],
)
def test_malformed_handles_are_refused(pool: KvPool, change: dict[str, object], field: str) -> None:
    message = handle_to_proto(pool.handle)
    for name, value in change.items():
        if value is None:
            message.ClearField("shm")
        elif isinstance(value, kv_pb2.CudaIpcSegment):
            message.cuda_ipc.CopyFrom(value)
        else:
            setattr(message, name, value)
    with pytest.raises(ValueError, match=field):
        handle_from_proto(message)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_the_remedy(variable: str) -> None:
    with pytest.raises(RuntimeError, match=f"start with {variable}=expandable_segments:False"):
        refuse_expandable_segments({variable: "max_split_size_mb:64, expandable_segments:True"})
    refuse_expandable_segments({variable: "max_split_size_mb:64,expandable_segments:False"})
    refuse_expandable_segments({})
