"""Verifiers on one Redis, for tests of the cold tier: what a context is, bit for bit, and what it answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch

from foveate.store.client import StoreSettings
from foveate.v1 import verifier_pb2
from tests.fakes import until
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Served, config_for, serving
from verifier_svc.config import ColdConfig

CLIP = clips.clip(9, fps=4)
OTHER = clips.clip(9, fps=4, seed=1)
NUM_TOKENS = 12


@contextlib.asynccontextmanager
async def cold_verifier(checkpoint: Path, settings: StoreSettings, **changes: Any) -> AsyncIterator[Served]:
    """Serves a verifier with a cold tier; `cold` is a dict of changed settings of it."""
    cold = ColdConfig(redis=settings, **{"num_connections": 2, **changes.pop("cold", {})})
    async with serving(config_for(checkpoint, cold=cold, deterministic=True, **changes)) as served:
        yield served


async def is_written(served: Served) -> None:
    """Waits until nothing is being written to the cold tier."""
    assert served.verifier.redis is not None
    publisher = served.verifier.redis.publisher
    await until(lambda: publisher.num_running == 0, within_s=20)


async def answer(served: Served, context: str, **fields: Any) -> tuple[list[int], verifier_pb2.SequenceOpened]:
    """Returns the first tokens of an answer and how the sequence opened."""
    async with served.answering(context, **fields) as stream:
        return await stream.plain(NUM_TOKENS), stream.opened


async def bits(served: Served, context: str) -> torch.Tensor:
    """Returns the bytes of a context's keys and values."""
    held = served.verifier.contexts.get(context.removeprefix("contexts/"))
    assert held is not None
    pool = served.verifier.parts.pool
    return await served.verifier.device.run(lambda: pool.region(held.slab).clone())


def counters(served: Served) -> dict[str, int]:
    """What happened to contexts."""
    return served.verifier.context_counters()
