"""Kept threads: the next turn computes only what is new, says the same; threads give way when memory is short.

Cases C2 (the same request again computes only the new text) and C3 (warm turns equal cold ones).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.kv_pool import Slab
from foveate.v1 import answers_pb2, verifier_pb2
from tests.fakes import until
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Served, config_for, serving
from verifier_svc.config import MIB
from verifier_svc.threads import Parked, ParkedThreads

CLIP = clips.clip(9, fps=4)
NUM_TOKENS = 12


@pytest.fixture
async def served(checkpoint: Path) -> AsyncIterator[Served]:
    async with serving(config_for(checkpoint, deterministic=True)) as served:
        yield served


async def say(
    served: Served, context: str, question: str, history: tuple[str, ...] = (), **fields: Any
) -> tuple[list[int], verifier_pb2.SequenceOpened]:
    """Returns an answer's tokens; ends the stream in order."""
    roles = (answers_pb2.ROLE_USER, answers_pb2.ROLE_ASSISTANT)
    turns = [answers_pb2.Turn(role=roles[index % 2], text=text) for index, text in enumerate(history)]
    async with served.answering(context, question, history=turns, **{"keep_thread": True, **fields}) as stream:
        tokens = await stream.plain(NUM_TOKENS)
        await stream.call.done_writing()
        await stream.call.read()
        return tokens, stream.opened


async def test_the_next_turn_computes_only_what_is_new(served: Served) -> None:
    context = (await served.prefill(CLIP, fps=4)).name
    first, opened = await say(served, context, "What is there?")
    assert opened.num_reused_tokens == 0
    history = ("What is there?", "Some answer.")
    cold, _ = await say(served, context, "And then?", history, keep_thread=False)
    warm, opened = await say(served, context, "And then?", history)
    assert warm == cold
    num_first_prompt = len("What is there?")  # a token a byte, and the template's around it
    assert opened.num_reused_tokens > num_first_prompt
    again, opened = await say(served, context, "And then?", history)
    num_thread = opened.num_prompt_tokens - opened.num_context_tokens
    assert again == cold
    assert num_thread - opened.num_reused_tokens <= len("And then?") + 32
    other, opened = await say(served, context, "Or what?", history)  # a branch
    assert opened.num_reused_tokens > num_first_prompt
    assert other == (await say(served, context, "Or what?", history, keep_thread=False))[0]
    assert (await say(served, context, "What is there?"))[0] == first
    assert served.verifier.threads.num_slabs >= 2


async def test_an_answer_that_comes_back_as_ids_is_reused_to_its_last_row(served: Served, checkpoint: Path) -> None:
    context = (await served.prefill(CLIP, fps=4)).name
    first, opened = await say(served, context, "What is there?")
    num_first_prompt = opened.num_prompt_tokens - opened.num_context_tokens
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = tokenizer.decode(first, skip_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False).ids != first  # as text it would be other tokens
    history = ("What is there?", text)
    ids = [verifier_pb2.TurnTokens(), verifier_pb2.TurnTokens(token_ids=first)]
    cold, _ = await say(served, context, "And then?", history, history_token_ids=ids, keep_thread=False)
    warm, opened = await say(served, context, "And then?", history, history_token_ids=ids)
    assert opened.num_reused_tokens == num_first_prompt + NUM_TOKENS - 1  # the last token was never fed
    assert warm == cold
    async with serving(config_for(checkpoint, deterministic=True)) as fresh:
        assert (await fresh.prefill(CLIP, fps=4)).name == context
        assert (await say(fresh, context, "And then?", history, history_token_ids=ids))[0] == cold


async def test_only_a_good_end_is_kept(served: Served) -> None:
    context = (await served.prefill(CLIP, fps=4)).name
    before = await served.used_bytes()
    async with served.answering(context, "What?", keep_thread=True) as stream:
        served.verifier.device.submit(time.sleep, 0.1)
        token_ids = (stream.opened.first_token_id,)
        asked = asyncio.ensure_future(stream.round(stream.opened.num_prompt_tokens, token_ids))
        await until(lambda: served.verifier.device.num_waiting == 2)  # cancelled with its round on the way
        stream.call.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await say(served, context, "What?", keep_thread=False)
    await until(lambda: served.verifier.num_sequences == 0)
    assert (served.verifier.threads.num_slabs, await served.used_bytes()) == (0, before)
    await say(served, context, "What?")
    await until(lambda: served.verifier.num_sequences == 0)
    assert served.verifier.threads.num_slabs == 1
    await served.stub.ReleaseContext(verifier_pb2.ReleaseContextRequest(name=context))
    assert (served.verifier.threads.num_slabs, await served.used_bytes()) == (0, 0)


async def test_threads_give_way_when_memory_is_short(checkpoint: Path) -> None:
    async with serving(config_for(checkpoint, pool_bytes=1 * MIB)) as small:
        context = (await small.prefill(CLIP, fps=4)).name
        for index in range(12):
            await say(small, context, f"Question {index}?", max_tokens=300)
        assert 0 < small.verifier.threads.num_slabs < 12
        assert small.verifier.contexts.get(context.removeprefix("contexts/")) is not None


def parked(*token_ids: int, context: str = "a", offset: int = 0) -> Parked:
    return Parked(context, token_ids, Slab(offset, 64), 100)


def test_bookkeeping() -> None:
    freed: list[int] = []
    threads = ParkedThreads(free=lambda slab: freed.append(slab.offset_bytes))
    threads.park(parked(1, 2, 3, offset=1))
    threads.park(parked(1, 2, 4, offset=2))
    threads.park(parked(1, 2, 3, 5, offset=3))  # goes on from the first
    threads.park(parked(1, 2, 3, context="b", offset=4))
    assert (freed, threads.num_slabs, threads.num_bytes) == ([1], 3, 300)
    assert threads.longest("a", (1, 2, 4, 9)) == (Slab(2, 64), 3)
    assert threads.longest("a", (7,)) is None
    assert threads.longest("c", (1, 2)) is None
    assert threads.evict()
    assert freed == [1, 3]  # 2 was used since
    threads.forget("a")
    assert freed == [1, 3, 2]
    assert threads.evict()
    assert not threads.evict()
