"""500 answers with random cancels about 20 videos, in a pool that holds 5 (cases K1, K2).

No wrong token, no leak, bounded memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from foveate.rpc.errors import NotFound, ResourceExhausted
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Served, Stream, config_for, serving
from verifier_svc.config import MIB

NUM_VIDEOS, NUM_HELD, NUM_ANSWERS, NUM_AT_ONCE, NUM_TOKENS = 20, 5, 500, 4, 8
QUESTIONS = ("What is that?", "How many are there, and of which colour?")
MAX_GROWTH_BYTES = 64 * MIB
Expected = dict[tuple[int, str], list[int]]


@contextlib.asynccontextmanager
async def asked(served: Served, data: bytes, question: str) -> AsyncIterator[Stream]:
    """Makes the context unless it is held, and opens a sequence on it; waits for room. Leaving cancels the stream."""
    async with contextlib.AsyncExitStack() as stack:
        while True:
            with contextlib.suppress(NotFound, ResourceExhausted):  # taken by others in between
                context = await served.prefill(data)
                stream = await stack.enter_async_context(served.answering(context.name, question))
                break
            await asyncio.sleep(0.01)
        yield stream


async def alone(served: Served, videos: list[bytes]) -> Expected:
    """The tokens of every question about every video, one at a time, where there is room for all."""
    found: Expected = {}
    for index, data in enumerate(videos):
        for question in QUESTIONS:
            async with asked(served, data, question) as stream:
                found[index, question] = await stream.plain(NUM_TOKENS)
    return found


async def some_answers(served: Served, videos: list[bytes], expected: Expected, seed: int, done: Counter[str]) -> None:
    """Answers questions until NUM_ANSWERS are done by all workers; some are cancelled before or between rounds."""
    chance = random.Random(seed)
    while done.total() < NUM_ANSWERS:
        index, question = chance.randrange(len(videos)), chance.choice(QUESTIONS)
        is_cancelled = chance.random() < 0.4
        done["cancelled" if is_cancelled else "answered"] += 1
        async with asked(served, videos[index], question) as stream:
            if not is_cancelled:
                assert await stream.plain(NUM_TOKENS) == expected[index, question]
                continue
            token_ids = await stream.plain(chance.randint(1, NUM_TOKENS - 1))
            round_ = asyncio.ensure_future(
                stream.round(stream.opened.num_prompt_tokens + len(token_ids) - 1, token_ids[-1:])
            )
            await asyncio.sleep(chance.choice((0, 0.002)))
            round_.cancel()


async def closed(served: Served) -> None:
    """Waits until no sequence is open."""
    async with asyncio.timeout(10):
        while served.verifier.num_sequences:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_answers_with_cancels_leave_the_books_balanced(checkpoint: Path) -> None:
    videos = [clips.clip(9, seed=seed) for seed in range(NUM_VIDEOS)]
    async with serving(config_for(checkpoint, pool_bytes=64 * MIB)) as roomy:
        expected = await alone(roomy, videos)
        held_bytes = roomy.verifier.contexts.num_bytes // NUM_VIDEOS
        async with asked(roomy, videos[0], QUESTIONS[1]):
            thread_bytes = await roomy.used_bytes() - roomy.verifier.contexts.num_bytes
    assert len({tuple(tokens) for tokens in expected.values()}) > NUM_VIDEOS  # a mix-up would show
    pool_bytes = NUM_HELD * held_bytes + NUM_AT_ONCE * thread_bytes + 4096
    async with serving(config_for(checkpoint, pool_bytes=pool_bytes)) as served:
        before_bytes, done = psutil.Process().memory_full_info().uss, Counter[str]()
        await asyncio.gather(
            *(some_answers(served, videos, expected, seed, done) for seed in range(NUM_AT_ONCE)),
        )
        assert min(done.values()) > NUM_ANSWERS // 4
        await closed(served)
        contexts, pool = served.verifier.contexts, served.verifier.parts.pool
        assert await served.used_bytes() == contexts.num_bytes
        assert contexts.num_bytes <= pool_bytes
        assert all(held.num_users == 0 for held in contexts.newest_first())
        assert served.verifier.scheduler.num_live == 0
        pool.check_integrity()
        for held in contexts.newest_first():
            contexts.release(held.facts.context_id)
        assert await served.used_bytes() == 0
        assert psutil.Process().memory_full_info().uss - before_bytes < MAX_GROWTH_BYTES
