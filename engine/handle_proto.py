"""PoolHandle and slabs to and from their protobuf messages."""

from __future__ import annotations

from engine.kv_handle import (
    CUDA_MEM_HANDLE_BYTES,
    CudaIpcSegment,
    PoolHandle,
    SelectionSlab,
    ShmSegment,
    Slab,
    TensorSlab,
)
from engine.layout import DTYPES, KvLayout, dtype_name
from foveate.v1 import kv_pb2


def layout_to_proto(layout: KvLayout) -> kv_pb2.KvLayout:
    """Encodes a layout."""
    return kv_pb2.KvLayout(
        dtype=dtype_name(layout.dtype),
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
    )


def handle_to_proto(handle: PoolHandle) -> kv_pb2.KvHandle:
    """Returns the message that names the pool."""
    message = kv_pb2.KvHandle(
        pool_id=handle.pool_id,
        epoch=handle.epoch,
        pool_bytes=handle.pool_bytes,
        dtype=dtype_name(handle.layout.dtype),
        num_layers=handle.layout.num_layers,
        num_kv_heads=handle.layout.num_kv_heads,
        head_dim=handle.layout.head_dim,
        model_fingerprint=handle.model_fingerprint,
    )
    segment = handle.segment
    if isinstance(segment, ShmSegment):
        message.shm.CopyFrom(kv_pb2.ShmSegment(path=segment.path, namespace_id=segment.namespace_id))
    else:
        message.cuda_ipc.CopyFrom(
            kv_pb2.CudaIpcSegment(
                device_uuid=segment.device_uuid,
                mem_handle=segment.mem_handle,
                base_offset_bytes=segment.base_offset_bytes,
            )
        )
    return message


def handle_from_proto(message: kv_pb2.KvHandle) -> PoolHandle:
    """Returns the handle a message names; ValueError, "field: what it must be", when it is malformed."""
    if message.dtype not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}")
    if not message.pool_id or not message.pool_bytes:
        raise ValueError("pool_id: pool_id and pool_bytes must be set")
    if not (message.num_layers and message.num_kv_heads and message.head_dim):
        raise ValueError("num_layers: num_layers, num_kv_heads and head_dim must be set")
    layout = KvLayout(message.num_layers, message.num_kv_heads, message.head_dim, DTYPES[message.dtype])
    segment = _segment_from_proto(message)
    return PoolHandle(message.pool_id, message.epoch, message.pool_bytes, segment, layout, message.model_fingerprint)


def slab_to_proto(slab: Slab) -> kv_pb2.KvSlab:
    """Returns the message that names a slab."""
    return kv_pb2.KvSlab(offset_bytes=slab.offset_bytes, capacity=slab.capacity)


def slab_from_proto(message: kv_pb2.KvSlab) -> Slab:
    """Returns the slab a message names; where it lies is checked when it is viewed."""
    return Slab(message.offset_bytes, message.capacity)


def selection_to_proto(slab: SelectionSlab) -> kv_pb2.KvSelection:
    """Returns the message that names a selection."""
    return kv_pb2.KvSelection(offset_bytes=slab.offset_bytes, num_selected=slab.num_selected)


def selection_from_proto(message: kv_pb2.KvSelection) -> SelectionSlab:
    """Returns the selection a message names; where it lies is checked when it is viewed."""
    return SelectionSlab(message.offset_bytes, message.num_selected)


def tensor_to_proto(slab: TensorSlab) -> kv_pb2.TensorSlab:
    """Returns the message that names a tensor."""
    return kv_pb2.TensorSlab(offset_bytes=slab.offset_bytes, shape=slab.shape, dtype=slab.dtype)


def tensor_from_proto(message: kv_pb2.TensorSlab) -> TensorSlab:
    """Returns the tensor a message names; ValueError, "field: what it must be", when it has no element or no dtype."""
    if message.dtype not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}")
    if not message.shape or not all(message.shape):
        raise ValueError("shape: must have dimensions, none of them 0")
    return TensorSlab(message.offset_bytes, tuple(message.shape), message.dtype)


def _segment_from_proto(message: kv_pb2.KvHandle) -> ShmSegment | CudaIpcSegment:
    if message.WhichOneof("transport") == "shm":
        return ShmSegment(message.shm.path, message.shm.namespace_id)
    if message.WhichOneof("transport") == "cuda_ipc":
        ipc = message.cuda_ipc
        if len(ipc.mem_handle) != CUDA_MEM_HANDLE_BYTES:
            raise ValueError(f"cuda_ipc.mem_handle: must have {CUDA_MEM_HANDLE_BYTES} bytes")
        return CudaIpcSegment(ipc.device_uuid, ipc.mem_handle, ipc.base_offset_bytes)
    raise ValueError("transport: must be set")
