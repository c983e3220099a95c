"""What of the CUDA path can be checked without a GPU: the raw handle goes through the bindings unchanged."""

from __future__ import annotations

from engine.cuda_ipc import handle_bytes, handle_from_bytes


def test_a_handle_is_its_64_bytes() -> None:
    data = bytes(range(100, 164))
    assert handle_bytes(handle_from_bytes(data)) == data
