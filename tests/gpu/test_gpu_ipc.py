"""CUDA IPC between two real processes on one card."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.cuda_ipc import device_uuid, find_device
from engine.handle_proto import handle_to_proto
from engine.kv_handle import CudaIpcSegment, PoolHandle, SelectionSlab, Slab
from engine.kv_pool import KvPool
from engine.kv_share import KvNotShared
from engine.layout import KvLayout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROOT = Path(__file__).parents[2]
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)


@pytest.fixture
def pool(cuda: torch.device) -> Iterator[KvPool]:
    made = KvPool.create(LAYOUT, pool_bytes=64 << 20, device=cuda, model_fingerprint="f" * 32)
    yield made
    made.close()


@contextlib.contextmanager
def reader(handle: PoolHandle, slab: Slab, selection: SelectionSlab) -> Iterator[subprocess.Popen[str]]:
    numbers = (slab.offset_bytes, slab.capacity, selection.offset_bytes, selection.num_selected)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.ipc_reader", *map(str, numbers)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        tell(process, handle_to_proto(handle).SerializeToString().hex())
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_another_process_reads_what_is_written_and_notices_the_end(pool: KvPool) -> None:
    first, slab = pool.allocate(100), pool.allocate(1000)
    selection = pool.allocate_selection(10)
    keys, values = pool.views(slab)
    keys.fill_(3.0)
    values.fill_(-2.0)
    pool.selection_view(selection).fill_(5)
    torch.cuda.synchronize()
    with reader(pool.handle, slab, selection) as process:
        tell(process, "read")
        assert answer(process) == f"3 -2 {5 * 10 * 8}"
        keys.fill_(7.0)
        pool.views(first)[0].fill_(9.0)  # a neighbour's rows must not show
        torch.cuda.synchronize()
        tell(process, "read")
        assert answer(process) == f"7 -2 {5 * 10 * 8}"
        tell(process, "check")
        assert answer(process) == "ok"
        pool.close()
        tell(process, "check")
        assert answer(process) == "KvStale"


def test_wrong_epoch_and_unknown_gpu_are_refused(pool: KvPool) -> None:
    slab, selection = pool.allocate(10), pool.allocate_selection(1)
    assert isinstance(pool.handle.segment, CudaIpcSegment)
    stale = dataclasses.replace(pool.handle, epoch=pool.handle.epoch + 2)
    with reader(stale, slab, selection) as process:
        assert answer(process) == "KvStale"
    segment = dataclasses.replace(pool.handle.segment, device_uuid="GPU-00000000-0000-0000-0000-000000000000")
    with reader(dataclasses.replace(pool.handle, segment=segment), slab, selection) as process:
        assert answer(process) == "KvNotShared"
    garbage = dataclasses.replace(pool.handle.segment, mem_handle=bytes(64))
    with reader(dataclasses.replace(pool.handle, segment=garbage), slab, selection) as process:
        assert answer(process) == "KvNotShared"


def test_devices_are_found_by_uuid(cuda: torch.device) -> None:
    assert find_device(device_uuid(cuda)) == cuda
    with pytest.raises(KvNotShared, match="not visible"):
        find_device("GPU-none")


def test_slabs_read_zeros_after_reuse(pool: KvPool) -> None:
    slab = pool.allocate(50)
    pool.views(slab)[0].fill_(1.0)
    pool.free(slab)
    assert float(pool.views(pool.allocate(50))[0].abs().sum()) == 0.0
    pool.check_integrity()


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused(cuda: torch.device, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setitem(os.environ, variable, "expandable_segments:True")
    with pytest.raises(RuntimeError, match="expandable_segments:False"):
        KvPool.create(LAYOUT, pool_bytes=1 << 20, device=cuda, model_fingerprint="f" * 32)
