"""Another process on the same GPU: maps the pool named on stdin, reports what it reads, writes nothing.

Lines in: the handle's message in hex once, then "read" or "check". Lines out: what was read, or the name of the error.
"""

from __future__ import annotations

import sys

import torch

from engine.handle_proto import handle_from_proto
from engine.kv_pool import SelectionSlab, Slab
from engine.kv_share import KvNotShared, KvStale, MappedPool
from foveate.v1 import kv_pb2


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(slab: Slab, selection: SelectionSlab) -> None:
    handle = handle_from_proto(kv_pb2.KvHandle.FromString(bytes.fromhex(sys.stdin.readline().strip())))
    try:
        pool = MappedPool.attach(handle, device=torch.device("cuda", 0))
        for line in sys.stdin:
            if line.strip() == "check":
                pool.check()
                say("ok")
            else:
                keys, values = pool.views(slab)
                chosen = pool.selection_view(selection)
                say(f"{float(keys.mean()):g} {float(values.mean()):g} {int(chosen.sum())}")
    except (KvStale, KvNotShared) as error:
        say(type(error).__name__)


if __name__ == "__main__":
    offset, capacity, selection_offset, num_selected = (int(argument) for argument in sys.argv[1:5])
    main(Slab(offset, capacity), SelectionSlab(selection_offset, num_selected))
