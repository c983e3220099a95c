"""Times the engine on one GPU: draft and verify steps at real size, and attaching to the pool from another process.

The model has random weights in the shape of Qwen2.5-VL-7B's text part, fewer layers: times are real, texts are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from engine.attention import KvView
from engine.handle_proto import handle_from_proto, handle_to_proto
from engine.kv_pool import KvPool, Slab
from engine.kv_share import MappedPool
from engine.loading import LoadedModel, load_model
from engine.runner import TextRunner
from foveate.v1 import kv_pb2
from tests.unit.engine.tiny_model import write_tiny_checkpoint

NUM_LAYERS = 8
NUM_SPARSE = 1024
CONTEXTS = (4096, 16_384, 65_536)


def write_large_checkpoint(folder: Path, device: str) -> Path:
    """Writes random weights of the 7B's layer shape over the tiny checkpoint's tokenizer and vision tower."""
    write_tiny_checkpoint(folder)
    config = Qwen2_5_VLConfig.from_pretrained(folder)
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "layer_types": ["full_attention"] * NUM_LAYERS,
    }
    settings = config.to_dict()
    settings["text_config"] |= text
    settings["vision_config"]["out_hidden_size"] = 3584
    large = Qwen2_5_VLConfig(**settings)
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration(large).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="50GB")
    return folder


def milliseconds(step: Callable[[], object], num: int = 20) -> float:
    """Median time of a step that ends with the device idle."""
    times = []
    for index in range(num + 3):
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if index >= 3:
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def steps(loaded: LoadedModel, pool: KvPool) -> dict[str, float]:
    """Times of one decode row, a verify of ten rows, and a draft row over the sparse view."""
    runner, times = TextRunner(loaded), {}

    def time_step(context: int, num_rows: int) -> float:
        slab, thread = pool.allocate(context), pool.allocate(256)
        keys, values = pool.views(slab)
        keys.normal_()
        values.normal_()
        kv = KvView((keys, values), pool.views(thread), 40)
        token_ids, position = list(range(20, 20 + num_rows)), context + 40
        taken = milliseconds(
            lambda: runner.logits(runner.step(token_ids=token_ids, position=position, kv=kv)).argmax(-1).tolist()
        )
        pool.free(slab)
        pool.free(thread)
        return taken

    times["draft_ms"] = time_step(NUM_SPARSE, 1)
    for context in CONTEXTS:
        times[f"decode_ms_{context}"] = time_step(context, 1)
        times[f"verify10_ms_{context}"] = time_step(context, 10)
    return times


def attach_from_another_process(pool: KvPool) -> dict[str, float]:
    """Maps the pool and gathers a sparse view in a process of its own; checks the sum that it read."""
    slab = pool.allocate(CONTEXTS[1])
    pool.views(slab)[0].fill_(0.5)
    torch.cuda.synchronize()
    message = handle_to_proto(pool.handle).SerializeToString().hex()
    arguments = [sys.executable, "-m", "bench.gpu_check", "--read", str(slab.offset_bytes), str(slab.capacity)]
    done = subprocess.run(arguments, input=message, capture_output=True, text=True, timeout=120, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if result.pop("mean") != 0.5:
        raise SystemExit("the other process did not read what was written")
    pool.free(slab)
    return result


def read(slab: Slab) -> None:
    """The other process."""
    handle = handle_from_proto(kv_pb2.KvHandle.FromString(bytes.fromhex(sys.stdin.read().strip())))
    torch.zeros(1, device="cuda")
    begin = time.perf_counter()
    pool = MappedPool.attach(handle, device=torch.device("cuda", 0))
    attach_ms = (time.perf_counter() - begin) * 1e3
    keys, _ = pool.views(slab)
    rows = torch.arange(0, slab.capacity, slab.capacity // NUM_SPARSE, device="cuda")
    gather_ms = milliseconds(lambda: keys.index_select(2, rows))
    print(json.dumps({"attach_ms": attach_ms, "gather_ms": gather_ms, "mean": float(keys.float().mean())}))


def main() -> None:
    """Prints a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--read", nargs=2, type=int, metavar=("OFFSET", "CAPACITY"), help="be the other process")
    parser.add_argument("--tests-status", type=int, default=0, help="exit status of the GPU tests, for the report")
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        print('No CUDA device: nothing to check.\n{"gpu": null}')
        return
    if flags.read:
        read(Slab(*flags.read))
        return
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(
            write_large_checkpoint(Path(folder), "cuda"), device="cuda", dtype="bfloat16", load_vision=False
        )
    pool_bytes = loaded.layout.slab_bytes(2 * CONTEXTS[-1])
    pool = KvPool.create(
        loaded.layout, pool_bytes=pool_bytes, device=loaded.device, model_fingerprint=loaded.fingerprint
    )
    times = steps(loaded, pool) | attach_from_another_process(pool)
    pool.close()
    for name, value in times.items():
        print(f"{name:24} {value:10.3f}")
    name = torch.cuda.get_device_name(loaded.device)
    rounded = {key: round(value, 3) for key, value in times.items()}
    print(json.dumps({"gpu": name, "tests_passed": flags.tests_status == 0, "num_layers": NUM_LAYERS} | rounded))


if __name__ == "__main__":
    main()
