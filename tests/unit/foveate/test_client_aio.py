"""The async client against a scripted gateway over real gRPC."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from foveate.client import AsyncClient, Guarantee, Progress, Stage
from foveate.rpc.errors import DeadlineExceeded, Internal, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from tests.unit.foveate.scripted_gateway import ScriptedGateway


async def test_ask_and_stream(gateway: ScriptedGateway, video: Path) -> None:
    seen: list[Progress] = []
    async with AsyncClient(gateway.address) as client:
        context = await client.create_context(video, fps=4.0, on_progress=seen.append)
        answer = await client.ask(context, "What happens?", temperature=0.5, seed=42)
        assert (answer.text, answer.seed, answer.guarantee) == ("The red ball rolls.", 42, Guarantee.LOSSLESS)
        async with client.stream(context, "q") as stream:
            texts = [delta.text async for delta in stream]
            assert "".join(texts) == stream.result.text
    assert [one.done for one in seen if one.stage is Stage.UPLOAD] == [2**20, 2 * 2**20, 2_560_000]


async def test_n_answers(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        answers = await client.ask_n("contexts/a", "q", n=2, temperature=0.5, seed=4)
        assert [(answer.text, answer.seed) for answer in answers] == [
            ("The red ball rolls.", 4),
            ("The red ball rolls.", 5),
        ]
        with pytest.raises(InvalidArgument) as refused:
            await client.ask("contexts/a", "q", n=2)
        assert [violation.field for violation in refused.value.violations] == ["n"]


async def test_contexts(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        made = [await client.create_context(server_path=f"{i}.mp4") for i in range(3)]
        assert len(await client.list_contexts()) == 3
        await client.delete_context(made[0])
        with pytest.raises(NotFound):
            await client.get_context(made[0])
        assert (await client.server_info()).kv_transport == "shm"
        assert await client.is_serving()


async def test_errors(gateway: ScriptedGateway, video: Path) -> None:
    async with AsyncClient(gateway.address) as client:
        with pytest.raises(InvalidArgument) as refused:
            await client.ask("contexts/a", "hot")
        assert refused.value.violations[0].field == "sampling.temperature"
        gateway.contexts.max_upload_bytes = 10
        with pytest.raises(ResourceExhausted):
            await client.create_context(video)
        with pytest.raises(NotFound):
            await client.create_context("/nowhere.mp4")
        with pytest.raises(Internal):
            await client.ask("contexts/a", "cut")
        with pytest.raises(DeadlineExceeded):
            await client.ask("contexts/a", "slow", timeout_s=0.2)
    async with AsyncClient("127.0.0.1:1") as client:
        assert not await client.is_serving()
        with pytest.raises(Unavailable, match="no server answers"):
            await client.server_info()


async def test_leaving_a_stream_and_cancelling_a_task_cancel_the_answer(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        async with client.stream("contexts/a", "slow") as stream:
            await anext(stream)
        assert await asyncio.to_thread(gateway.answers.cancelled.wait, 2)
        gateway.answers.cancelled.clear()
        task = asyncio.create_task(client.ask("contexts/a", "slow"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gateway.answers.cancelled.wait, 2)


async def test_answers_run_beside_each_other(gateway: ScriptedGateway) -> None:
    started = time.monotonic()
    async with AsyncClient(gateway.address) as client:
        answers = await asyncio.gather(*(client.ask("contexts/a", "q") for _ in range(16)))
    assert {answer.text for answer in answers} == {"The red ball rolls."}
    assert time.monotonic() - started < 5
