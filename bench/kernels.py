"""What does a step of decoding cost, by the rows in it and the tokens it looks back on?

    python -m bench.kernels [--tokens 1024,4096,16384,65536] [--rows 1,2,4,6,10,16]

One step of the target on one thread, over random keys and values, without any service: a plain step is one row, a
verification of n drafts n + 1 rows. Each cell is the least CPU time of several repeats, for other work shares this
machine. A step over a long context cannot be faster than its keys and values can be read, so the table also says
which share of the read bandwidth, measured in the same run, they were read with. "PyTorch" is the same step with
PyTorch's flash attention and matrix products.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.report import print_json, print_table, say
from engine.attention import KvView
from engine.layout import KvLayout
from engine.loading import load_model
from engine.native.build import user_cache
from engine.runner import TextRunner
from foveate.checkpoints import default_checkpoint

THREAD_LEN = 100  # rows of question and answer before the step
READ_FLOATS = 64 * 1024 * 1024  # 256 MiB: more than any cache holds
REPEATS = 5
MAX_REPEATS = 60
SECONDS_PER_CELL = 1.0


def main() -> None:
    arguments = _parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loaded = load_model(arguments.model, load_vision=False)
    native, pytorch = TextRunner(loaded, kernel_cache=user_cache(os.environ)), TextRunner(loaded)
    if native.kernel_name == pytorch.kernel_name:
        say("no compiled kernel here (no C compiler?): both columns are PyTorch's")
    read = READ_FLOATS * 4 / _least_seconds(torch.randn(READ_FLOATS).sum)
    say(f"read bandwidth of one core: {read / 1e9:.1f} GB/s; {loaded.layout.bytes_per_token} bytes of KV per token")
    table, values = [], dict[str, dict[str, dict[str, float]]]()
    for num_tokens in arguments.tokens:
        kv = _random_view(loaded.layout, num_tokens, max(arguments.rows))
        cells = values[str(num_tokens)] = {}
        for num_rows in arguments.rows:
            own_s, their_s = _step_seconds(native, kv, num_rows), _step_seconds(pytorch, kv, num_rows)
            rate = loaded.layout.bytes_per_token * (num_tokens + THREAD_LEN + num_rows) / own_s
            cell = {
                "ms": own_s * 1e3,
                "gb_per_s": rate / 1e9,
                "share_of_read": rate / read,
                "vs_one_row": own_s * 1e3 / cells.get("1", {"ms": own_s * 1e3})["ms"],
                "pytorch_vs_native": their_s / own_s,
            }
            cells[str(num_rows)] = {name: round(value, 3) for name, value in cell.items()}
            table.append((f"{num_tokens} tokens, {num_rows} rows", *cell.values()))
    columns = ("step", "ms", "GB/s", "of read bandwidth", "vs one row", "PyTorch vs this")
    print_table(f"one step of {loaded.name}, {native.kernel_name}", columns, table)
    print_json({"kernel": native.kernel_name, "read_gb_per_s": round(read / 1e9, 2), "steps": values})


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_numbers, default=[1024, 4096, 16384, 65536], help="context lengths")
    parser.add_argument("--rows", type=_numbers, default=[1, 2, 4, 6, 10, 16], help="rows of a step, ascending")
    parser.add_argument("--model", type=Path, default=default_checkpoint())
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _random_view(layout: KvLayout, num_tokens: int, max_rows: int) -> KvView:
    def rows(capacity: int) -> tuple[Tensor, Tensor]:
        shape = (layout.num_layers, layout.num_kv_heads, capacity, layout.head_dim)
        return torch.randn(shape), torch.randn(shape)

    return KvView(rows(num_tokens), rows(THREAD_LEN + max_rows), THREAD_LEN)


def _step_seconds(runner: TextRunner, kv: KvView, num_rows: int) -> float:
    position = kv.context_len + kv.thread_len
    return _least_seconds(lambda: runner.step(token_ids=[20] * num_rows, position=position, kv=kv))


def _least_seconds(work: Callable[[], object]) -> float:
    """Returns the least CPU time of this thread, over about a second of repeats."""
    times: list[float] = []
    while len(times) < REPEATS or (sum(times) < SECONDS_PER_CELL and len(times) < MAX_REPEATS):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


if __name__ == "__main__":
    main()
