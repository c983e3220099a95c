"""Damaged and hostile video files through the service: each is read or refused, and the next good one works."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from foveate.rpc.errors import FoveateError, InvalidArgument, ResourceExhausted
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import config_for, serving


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Returns a file with a few bytes changed, a piece cut, doubled or replaced by noise; the head mostly kept."""
    copy = bytearray(data)
    kind = chance.randrange(4)
    if kind == 0:
        for _ in range(chance.choice((1, 5, 50))):
            copy[chance.randrange(8, len(copy))] = chance.randrange(256)
    elif kind == 1:
        del copy[chance.randrange(16, len(copy)) :]
    elif kind == 2:
        start = chance.randrange(16, len(copy))
        copy[start : start + 64] = chance.randbytes(64)
    else:
        start = chance.randrange(16, len(copy))
        copy[start:start] = copy[start : start + chance.randrange(1, 500)]
    return bytes(copy)


@pytest.mark.parametrize("number", [10, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
async def test_no_file_takes_the_service_down(checkpoint: Path, number: int) -> None:
    originals = [clips.clip(8), clips.clip(6, container="webm", codec="libvpx-vp9"), clips.gif(5)]
    chance, seen = random.Random(number), Counter[str]()
    async with serving(config_for(checkpoint)) as served:
        for _ in range(number):
            try:
                await served.prefill(damaged(chance.choice(originals), chance))
                seen["read"] += 1
            except (InvalidArgument, ResourceExhausted) as error:
                seen[error.reason] += 1
            except FoveateError as error:
                # grpc.aio's client sometimes loses the status of a stream that was refused while it wrote.
                if "Internal error from Core" not in error.message:
                    raise
        context = await served.prefill(originals[0])
        assert context.video.num_frames == 4
    assert seen.total() > number / 2
