"""Programs of the two-process tests: `owner` makes a pool and prints its handle, `reader` maps one and reports.

Handles travel as hex of their message over stdin and stdout.
"""

from __future__ import annotations

import signal
import sys

import torch

from engine.handle_proto import handle_from_proto, handle_to_proto
from engine.kv_pool import KvPool, Slab
from engine.kv_share import MappedPool
from engine.layout import KvLayout
from foveate.v1 import kv_pb2

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)
SLAB = Slab(4096, 10)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def owner() -> None:
    pool = KvPool.create(LAYOUT, pool_bytes=1 << 20, device=torch.device("cpu"), model_fingerprint="f" * 32)
    slab = pool.allocate(SLAB.capacity)
    assert slab == SLAB
    keys, values = pool.views(slab)
    keys.fill_(3.0)
    values.fill_(4.0)
    say(handle_to_proto(pool.handle).SerializeToString().hex())
    for line in sys.stdin:
        if line.strip() == "close":
            pool.close()
            say("closed")
        else:
            keys.fill_(float(line))
            say("written")


def reader(*, stray_write: bool) -> None:
    handle = handle_from_proto(kv_pb2.KvHandle.FromString(bytes.fromhex(sys.stdin.readline().strip())))
    pool = MappedPool.attach(handle, device=torch.device("cpu"))
    keys, values = pool.views(SLAB)
    say(f"{float(keys.mean())} {float(values.mean())}")
    if stray_write:
        keys.fill_(5.0)
    pool.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1] == "owner":
        owner()
    else:
        reader(stray_write=sys.argv[1] == "stray-writer")
