"""CUDA memory across processes through the raw 64-byte IPC handle.

The handle denotes the whole cudaMalloc block, so the pool is one tensor, allocated first; its offset inside the block
travels beside the handle. Devices are named by UUID: ordinals differ between processes. No reference counters and no
pickles: the owner outlives its readers by contract (the sequence ends before its slab is freed), and a reader checks
the header's epoch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.kv_handle import CUDA_MEM_HANDLE_BYTES, CudaIpcSegment
from engine.kv_memory import KvNotShared

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def refuse_expandable_segments(environ: os._Environ[str] | dict[str, str] = os.environ) -> None:
    """Raises RuntimeError with the remedy when torch would allocate memory that cudaIpcGetMemHandle cannot export."""
    for variable in _ALLOCATOR_VARIABLES:
        settings = dict(part.partition(":")[::2] for part in environ.get(variable, "").replace(" ", "").split(","))
        if settings.get("expandable_segments", "").lower() in ("true", "1"):
            raise RuntimeError(
                f"{variable} turns on expandable_segments, whose memory cannot be shared with a drafter; "
                f"start with {variable}=expandable_segments:False"
            )


def device_uuid(device: torch.device) -> str:
    """Returns the GPU's UUID in the driver's form, "GPU-..."."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def find_device(uuid: str) -> torch.device:
    """Returns this process's device with that UUID; raises KvNotShared when it sees none."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if device_uuid(device) == uuid:
            return device
    raise KvNotShared(f"GPU {uuid} is not visible to this process")


def allocate_exported(num_bytes: int, device: torch.device) -> tuple[Tensor, CudaIpcSegment]:
    """Allocates zeroed memory, uint8 [num_bytes], and exports the block it lies in; RuntimeError when that fails."""
    from cuda.bindings import driver, runtime

    refuse_expandable_segments()
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    base, _ = _checked(driver.cuMemGetAddressRange(memory.data_ptr()), "cuMemGetAddressRange")
    (handle,) = _checked(runtime.cudaIpcGetMemHandle(int(base)), "cudaIpcGetMemHandle")
    segment = CudaIpcSegment(
        device_uuid=device_uuid(device),
        mem_handle=handle_bytes(handle),
        base_offset_bytes=memory.data_ptr() - int(base),
    )
    return memory, segment


def open_exported(segment: CudaIpcSegment, num_bytes: int, device: torch.device) -> Tensor:
    """Maps another process's block and returns the pool in it, uint8 [num_bytes], on the exporting GPU.

    Raises KvNotShared when the GPU is not this process's `device` or the driver refuses. The block stays open for as
    long as a tensor over it lives.
    """
    from cuda.bindings import runtime

    if device.type != "cuda":
        raise KvNotShared(f"a pool in CUDA memory cannot be read from {device.type}")
    if len(segment.mem_handle) != CUDA_MEM_HANDLE_BYTES:
        raise KvNotShared(f"a CUDA IPC handle has {CUDA_MEM_HANDLE_BYTES} bytes, not {len(segment.mem_handle)}")
    source = find_device(segment.device_uuid)
    torch.cuda.set_device(source)
    torch.cuda.current_stream(source).synchronize()  # makes sure that the primary context exists
    handle = handle_from_bytes(segment.mem_handle)
    try:
        opened = runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        (pointer,) = _checked(opened, "cudaIpcOpenMemHandle")
    except RuntimeError as error:
        raise KvNotShared(str(error)) from error
    block = _OpenedBlock(int(pointer), segment.base_offset_bytes, num_bytes)
    return torch.as_tensor(block, device=source)


def handle_bytes(handle: Any) -> bytes:
    """Returns the 64 bytes of a cudaIpcMemHandle_t, which the bindings keep opaque."""
    return ctypes.string_at(handle.getPtr(), CUDA_MEM_HANDLE_BYTES)


def handle_from_bytes(data: bytes) -> Any:
    """Returns a cudaIpcMemHandle_t of exactly 64 bytes."""
    from cuda.bindings import runtime

    handle = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), data, CUDA_MEM_HANDLE_BYTES)
    return handle


class _OpenedBlock:
    """An opened IPC block, presented to torch, which keeps it alive for as long as a tensor uses it."""

    def __init__(self, pointer: int, offset_bytes: int, num_bytes: int) -> None:
        self._pointer = pointer
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer + offset_bytes, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        from cuda.bindings import runtime

        runtime.cudaIpcCloseMemHandle(self._pointer)


def _checked(result: Sequence[Any], call: str) -> Sequence[Any]:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"{call} failed: {error.name}")
    return values
