"""Contexts that look alike and are not: two verifiers and one Redis never take one for the other.

Cases C1 and C7. Each pair is made by one verifier and asked about on another, which restores both; the answers are
those of a verifier that never heard of the other one, and of Redis.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.redis_server import RedisServer
from foveate.context_source import ContextSource
from foveate.v1 import contexts_pb2, verifier_pb2
from tests.unit.engine.tiny_model import write_tiny_checkpoint
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.cold_bench import answer, bits, cold_verifier, is_written
from tests.unit.verifier_svc.serving import Served, config_for, serving, upload
from verifier_svc import identity


@dataclass(frozen=True)
class Case:
    """A video, how it is looked at, and for whom."""

    data: bytes
    fps: float = 4
    max_frames: int | None = None
    tenant: str = ""

    async def create(self, served: Served) -> contexts_pb2.Context:
        sampling = {"fps": self.fps} | ({} if self.max_frames is None else {"max_frames": self.max_frames})
        spec, *chunks = upload(self.data, **sampling)
        spec.tenant = self.tenant
        return (await served.prefill_events([spec, *chunks]))[-1].context


def halves(first: int, second: int) -> bytes:
    """One file with two shots of four frames, each drawn from its own seed."""
    return clips.shots([(4, first), (4, second)])


CLIP = clips.clip(9, fps=4)
PAIRS: dict[str, tuple[Case, Case]] = {
    "same file, other rate asked for": (Case(CLIP, fps=4), Case(CLIP, fps=2)),
    "same file, nearly the same rate": (Case(CLIP, fps=4), Case(CLIP, fps=4.0000005)),
    "same file, fewer frames": (Case(CLIP), Case(CLIP, max_frames=8)),
    "same file, a bound that changes nothing": (Case(CLIP, max_frames=9), Case(CLIP, max_frames=10)),
    "same frames, other frame rate": (Case(clips.clip(8, fps=1), fps=1), Case(clips.clip(8, fps=4), fps=4)),
    "same frames, one more": (Case(clips.clip(8, fps=4)), Case(CLIP)),
    "same frames, two more": (Case(clips.clip(7, fps=4)), Case(CLIP)),
    "same number of tokens, other size": (Case(clips.clip(8, size=(64, 48))), Case(clips.clip(8, size=(48, 64)))),
    "same pixels, other grid": (Case(clips.clip(8, size=(64, 64))), Case(clips.clip(8, size=(96, 64)))),
    "same frames, other times": (Case(clips.clip(6, ticks=[0, 250, 500, 750, 1000, 1250])),
                                 Case(clips.clip(6, ticks=[0, 250, 500, 900, 1000, 1250]))),
    "order of two shots": (Case(halves(1, 2)), Case(halves(2, 1))),
    "one shot twice": (Case(halves(1, 1)), Case(halves(1, 2))),
    "other content": (Case(CLIP), Case(clips.clip(9, fps=4, seed=1))),
    "same prefix, a box more": (Case(CLIP), Case(CLIP + b"\0\0\0\x08free")),
    "same prefix, another box more": (Case(CLIP + b"\0\0\0\x08free"), Case(CLIP + b"\0\0\0\x08skip")),
    "same frames, turned": (Case(CLIP), Case(clips.rotated(CLIP))),
    "same frames, other container": (Case(CLIP), Case(clips.clip(9, fps=4, container="matroska"))),
    "same frames, other codec": (Case(CLIP), Case(clips.clip(9, fps=4, codec="libx264"))),
    "tenant and none": (Case(CLIP), Case(CLIP, tenant="a")),
    "tenants that begin alike": (Case(CLIP, tenant="a"), Case(CLIP, tenant="ab")),
    "tenants that differ by a space": (Case(CLIP, tenant="a"), Case(CLIP, tenant="a ")),
    "tenant that looks like a field": (Case(CLIP, tenant="a"), Case(CLIP, tenant="a\0tenant")),
}  # fmt: skip


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def check_pair(first: Served, second: Served, alone: Served, cases: tuple[Case, Case]) -> None:
    """Makes both on `first`, asks about both on `second`, and compares with `alone`, which has no Redis."""
    made = [await case.create(first) for case in cases]
    assert made[0].name != made[1].name
    await is_written(first)
    for case, context in zip(cases, made, strict=True):
        tokens, opened = await answer(second, context.name, tenant=case.tenant)
        assert opened.fetch.source != ContextSource.POOL
        cold = await case.create(alone)
        assert cold.name == context.name
        assert torch.equal(await bits(alone, cold.name), await bits(second, context.name))
        assert (await answer(alone, cold.name, tenant=case.tenant))[0] == tokens
        request = verifier_pb2.ReleaseContextRequest(name=cold.name, tenant=case.tenant)
        await alone.stub.ReleaseContext(request)


@pytest.fixture
async def three(checkpoint: Path, redis_server: RedisServer) -> AsyncIterator[tuple[Served, Served, Served]]:
    with redis_server.client() as client:
        client.flushall()
    settings = redis_server.settings()
    async with (
        cold_verifier(checkpoint, settings) as first,
        cold_verifier(checkpoint, settings) as second,
        serving(config_for(checkpoint, deterministic=True)) as alone,
    ):
        yield first, second, alone


@pytest.mark.parametrize("pair", PAIRS)
async def test_videos_that_look_alike(three: tuple[Served, Served, Served], pair: str) -> None:
    await check_pair(*three, PAIRS[pair])


def changed_json(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    path = folder / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "other"))


def _weights(checkpoint: Path, tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "other", spread=0.3, seed=1)


def _processor(checkpoint: Path, tmp_path: Path) -> Path:
    folder = _copy(checkpoint, tmp_path)
    (name,) = [one.name for one in folder.glob("*processor*.json") if "video" in one.read_text()][:1]

    def change(content: Any) -> None:
        (content.get("video_processor") or content)["size"]["longest_edge"] = 64 * 64

    changed_json(folder, name, change)
    return folder


def _template(checkpoint: Path, tmp_path: Path) -> Path:
    folder = _copy(checkpoint, tmp_path)
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("helpful", "terse"))
    return folder


MODELS: dict[str, tuple[Callable[[Path, Path], Path], dict[str, Any]]] = {
    "other weights": (_weights, {}),
    "other processor settings": (_processor, {}),
    "other system prompt": (_template, {}),
    "other dtype": (lambda checkpoint, tmp_path: checkpoint, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("kind", MODELS)
async def test_models_that_look_alike(checkpoint: Path, redis_server: RedisServer, tmp_path: Path, kind: str) -> None:
    with redis_server.client() as client:
        client.flushall()
    variant, changes = MODELS[kind]
    case, settings = Case(CLIP), redis_server.settings()
    other = variant(checkpoint, tmp_path)
    async with cold_verifier(checkpoint, settings) as first, cold_verifier(other, settings, **changes) as second:
        made = [await case.create(served) for served in (first, second)]
        assert made[0].name != made[1].name
        assert not made[1].reused
        tokens, _ = await answer(second, made[1].name)
        await is_written(first)
        await is_written(second)
    plain = replace(config_for(other, deterministic=True), **changes)
    async with serving(plain) as alone, cold_verifier(other, settings, **changes) as again:
        cold = await case.create(alone)
        assert cold.name == made[1].name
        restored, opened = await answer(again, cold.name)
        assert opened.fetch.source != ContextSource.POOL
        assert restored == tokens == (await answer(alone, cold.name))[0]


@pytest.mark.parametrize("name", ["POSITION_ALGORITHM", "FRAME_ALGORITHM", "version"])
async def test_another_release_never_reads_it(
    checkpoint: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with redis_server.client() as client:
        client.flushall()
    case, settings = Case(CLIP), redis_server.settings()
    async with cold_verifier(checkpoint, settings) as first:
        made = await case.create(first)
        await is_written(first)
    monkeypatch.setattr(identity, name, (lambda library: "9.9") if name == "version" else "another")
    async with cold_verifier(checkpoint, settings) as second:
        other = await case.create(second)
    assert other.name != made.name
    assert other.fetch.source == ContextSource.MEDIA


def test_there_are_enough_pairs() -> None:
    assert len(PAIRS) + len(MODELS) >= 24
