"""How long does the first token of a question take: cold, hot, restored from Redis, from embeddings?

    python -m bench.contexts [--visual-tokens 1024,4096,16384] [--model DIR]

A real redis-server and real verifier and gateway processes, all in this run. Per length, one held-out video:

    cold        create the context from the file (upload, decode, encode, prefill) and ask
    hot         ask again, on the context in the pool
    restore     ask a fresh verifier process, which reads keys and values from Redis
    embeddings  ask a fresh verifier process when Redis has only the vision tower's output

All times are the client's, from the call to the first delta. The restore's bandwidth is that of the context's arrival
(its bytes by the time the verifier took for it), beside a loop of plain GETs with redis-py and hiredis over the very
same values, and beside redis-benchmark where it is installed. Bit-equality compares the bytes of keys and values, and
the logits after a question, of two verifiers in this process, one that prefilled and one that restored.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.long_videos import FPS, num_frame_pairs
from bench.redis_server import RedisServer
from bench.report import print_json, print_table, say
from bench.world import held_out, write_mp4
from engine.attention import KvView
from engine.device_thread import DeviceThread
from engine.positions import text_positions
from foveate.checkpoints import default_checkpoint
from foveate.client import Answer, Client, Context, ContextSource, DraftMode
from foveate.rpc.errors import FoveateError
from foveate.stack import Stack, StackConfig
from foveate.store import keys
from verifier_svc.config import ColdConfig, MediaLimits, VerifierConfig
from verifier_svc.verifier import ContextSpec, UploadChunk, Verifier

QUESTION = "Describe the video."
HOT_REPEATS = 7


@dataclass
class Row:
    """Times of one length, in ms."""

    num_visual_tokens: int
    kv_bytes: int
    cold_bytes: dict[str, int]
    cold_ms: float = 0.0
    hot_ms: float = 0.0
    restore_ms: float = 0.0
    embeddings_ms: float = 0.0
    arrival_ms: float = 0.0
    restore_bytes_per_s: float = 0.0
    get_bytes_per_s: float = 0.0

    @property
    def bandwidth_share(self) -> float:
        return self.restore_bytes_per_s / self.get_bytes_per_s


def main() -> None:
    arguments = _parse_arguments()
    lengths = [int(part) for part in arguments.visual_tokens.split(",")]
    rows = []
    with tempfile.TemporaryDirectory(prefix="foveate-bench-") as folder, RedisServer(Path(folder)) as redis:
        for length in lengths:
            say(f"{length} visual tokens")
            video = Path(folder) / f"{length}.mp4"
            write_mp4(held_out("describe", 3, num_frame_pairs=num_frame_pairs(length)).world, video, fps=FPS)
            rows.append(_measure(arguments, redis, video))
        is_equal = all(
            asyncio.run(_bit_equality(arguments, redis, (Path(folder) / f"{length}.mp4").read_bytes()))
            for length in lengths
        )
        benchmark = _redis_benchmark(redis)
    _print_result(rows, is_equal, benchmark)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visual-tokens", default="1024,4096,16384", help="comma-separated context lengths")
    parser.add_argument("--model", type=Path, default=default_checkpoint(), help="checkpoint folder")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per length; the best counts")
    parser.add_argument("--connections", type=int, default=4, help="connections of a restore")
    return parser.parse_args()


@contextmanager
def _fresh(arguments: argparse.Namespace, redis: RedisServer) -> Iterator[Client]:
    """A verifier and a gateway that were never asked anything."""
    config = StackConfig(
        model=arguments.model,
        use_drafter=False,
        redis_url=redis.url,
        pool_mib=512,
        num_threads=1,
        extra_verifier_arguments=(
            *("--max-visual-tokens", "140000", "--max-frames", "40000"),
            *("--cold-connections", str(arguments.connections), "--redis-timeout-ms", "2000"),
        ),
        extra_gateway_arguments=("--redis-timeout-ms", "2000"),
    )
    with Stack(config) as stack, Client(stack.addresses.gateway, timeout_s=3600) as client:
        yield client


def _measure(arguments: argparse.Namespace, redis: RedisServer, video: Path) -> Row:
    with _fresh(arguments, redis) as client:
        before = time.perf_counter()
        context = client.create_context(video, fps=FPS)
        asking_ms, first = _ask(client, context)
        cold_ms = (time.perf_counter() - before) * 1e3 - (asking_ms.total - asking_ms.first)
        hot_ms = min(_ask(client, context)[0].first for _ in range(HOT_REPEATS))
        tiers = _wait_written(client, context)
    row = Row(context.num_visual_tokens, context.kv_bytes, tiers, cold_ms=cold_ms, hot_ms=hot_ms)
    restored = [_come_back(arguments, redis, context, first, ContextSource.COLD_KV) for _ in range(arguments.repeats)]
    row.restore_ms, row.arrival_ms = min(restored)
    row.restore_bytes_per_s = tiers["cold_kv"] / min(arrival for _, arrival in restored) * 1e3
    row.get_bytes_per_s = _plain_gets(redis, context)
    with redis.client() as store:
        store.delete(keys.manifest(context.name.removeprefix("contexts/"), "kv"))
    row.embeddings_ms, _ = _come_back(arguments, redis, context, first, ContextSource.COLD_EMBEDDINGS)
    return row


@dataclass(frozen=True)
class _Asking:
    first: float  # ms to the first delta
    total: float


def _ask(client: Client, context: Context) -> tuple[_Asking, Answer]:
    before = time.perf_counter()
    stream = client.stream(context, QUESTION, max_tokens=8, draft=DraftMode.OFF)
    next(stream)
    first_ms = (time.perf_counter() - before) * 1e3
    answer = stream.result
    return _Asking(first_ms, (time.perf_counter() - before) * 1e3), answer


def _come_back(
    arguments: argparse.Namespace, redis: RedisServer, context: Context, expected: Answer, source: ContextSource
) -> tuple[float, float]:
    """Returns ms to the first token, and ms the context took to arrive, in a fresh verifier process."""
    with _fresh(arguments, redis) as client:
        asking, answer = _ask(client, context)
    assert answer.token_ids == expected.token_ids, "a context that came back answers otherwise"
    assert answer.fetch is not None
    assert answer.fetch.source is source, f"it came from {answer.fetch.source.name}: {answer.fetch.costs}"
    return asking.first, answer.fetch.took_ms


def _wait_written(client: Client, context: Context) -> dict[str, int]:
    for _ in range(3000):
        tiers = dict(client.get_context(context).tiers)
        if "cold_kv" in tiers:
            return tiers
        time.sleep(0.02)
    raise TimeoutError("the context was not written to Redis")


def _plain_gets(redis: RedisServer, context: Context) -> float:
    """Returns bytes per second of GETs over the context's chunks with redis-py and hiredis, the best of three loops."""
    best = 0.0
    with redis.client() as store:
        pattern = f"foveate:{{{context.name.removeprefix('contexts/')}}}:kv:[0-9]*:*"
        names = list(store.scan_iter(pattern, count=10_000))
        for _ in range(3):
            before = time.perf_counter()
            num_bytes = sum(len(store.get(name) or b"") for name in names)  # type: ignore[arg-type]
            best = max(best, num_bytes / (time.perf_counter() - before))
    return best


def _redis_benchmark(redis: RedisServer) -> str:
    tool = shutil.which("redis-benchmark")
    if tool is None:
        return "not installed"
    command = [tool, "-p", str(redis.port), "-n", "200", "-c", "4", "-d", str(2 * 1024 * 1024), "-t", "get", "--csv"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()[-1]


async def _bit_equality(arguments: argparse.Namespace, redis: RedisServer, data: bytes) -> bool:
    """Tells whether keys, values and logits are equal bit for bit, prefilled and restored."""
    device = DeviceThread()
    try:
        config = VerifierConfig(
            arguments.model,
            pool_bytes=512 * 1024 * 1024,
            media=MediaLimits(max_visual_tokens=140_000),
            cold=ColdConfig(redis.settings(), num_connections=arguments.connections),
        )
        first, second = await Verifier.load(config, device), await Verifier.load(config, device)
        try:
            spec = ContextSpec(path=None, total_bytes=len(data), fps=FPS, max_frames=None)
            made = await first.create_context(spec, _chunks(data), _ignore)
            context_id = made.context.name.removeprefix("contexts/")
            assert first.redis is not None
            while first.redis.publisher.num_running:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
            held, fetch = await second.obtain(context_id, "")
            assert fetch.source is ContextSource.COLD_KV, fetch
            second.contexts.give_back(held)
            both = [await device.run(_bits_and_logits, one, context_id) for one in (first, second)]
        finally:
            await first.close()
            await second.close()
    finally:
        device.close()
    return all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@torch.inference_mode()
def _bits_and_logits(verifier: Verifier, context_id: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes of a context's slab, and the logits after a question on it [num_tokens, vocab]."""
    held = verifier.contexts.get(context_id)
    assert held is not None
    parts, pool = verifier.parts, verifier.parts.pool
    token_ids = parts.prompts.thread((), QUESTION).token_ids
    thread = pool.allocate(-(-len(token_ids) // 64) * 64)
    try:
        start = held.facts.num_tokens + held.facts.position_delta
        kv = KvView(pool.views(held.slab), pool.views(thread), 0)
        hidden = parts.runner.forward(token_ids=token_ids, positions=text_positions(start, len(token_ids)), kv=kv)
        return pool.region(held.slab).clone(), parts.runner.logits(hidden).clone()
    finally:
        pool.free(thread)


async def _chunks(data: bytes) -> AsyncIterator[UploadChunk]:
    for start in range(0, len(data), 1024 * 1024):
        yield UploadChunk(start, data[start : start + 1024 * 1024])


async def _ignore(progress: object) -> None:
    """Progress is of no interest here."""


def _print_result(rows: list[Row], is_equal: bool, benchmark: str) -> None:
    print_table(
        "Time to first token, ms",
        ["visual tokens", "cold", "hot", "restore", "embeddings", "hot/cold", "restore/cold", "embeddings/cold"],
        [
            (
                row.num_visual_tokens,
                *(row.cold_ms, row.hot_ms, row.restore_ms, row.embeddings_ms),
                *(row.cold_ms / row.hot_ms, row.cold_ms / row.restore_ms, row.cold_ms / row.embeddings_ms),
            )
            for row in rows
        ],
    )
    print_table(
        "In Redis",
        [
            "visual tokens",
            "KV MB",
            "embeddings MB",
            "video MB",
            "arrival ms",
            "restore MB/s",
            "GET MB/s",
            "share",
        ],
        [
            (
                row.num_visual_tokens,
                *(row.cold_bytes.get(name, 0) / 1e6 for name in ("cold_kv", "cold_embeddings", "media")),
                *(row.arrival_ms, row.restore_bytes_per_s / 1e6, row.get_bytes_per_s / 1e6, row.bandwidth_share),
            )
            for row in rows
        ],
    )
    say(f"redis-benchmark GET of 2 MiB: {benchmark}; KV and logits after a restore equal bit for bit: {is_equal}")
    figures: dict[str, Any] = {
        str(row.num_visual_tokens): {
            "hot_vs_cold": row.cold_ms / row.hot_ms,
            "restore_vs_cold": row.cold_ms / row.restore_ms,
            "embeddings_vs_cold": row.cold_ms / row.embeddings_ms,
            "restore_bandwidth_share": row.bandwidth_share,
            "cold_ms": row.cold_ms,
            "hot_ms": row.hot_ms,
            "restore_ms": row.restore_ms,
            "kv_bytes": row.kv_bytes,
        }
        for row in rows
    }
    print_json({**figures, "bit_equal": is_equal})


if __name__ == "__main__":
    try:
        main()
    except FoveateError as error:
        raise SystemExit(f"bench.contexts: {error}") from None
