"""Who runs next: steps over all that is ready, turns between them, cancellation, errors of one among many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import Block, Output
from engine.device_thread import DeviceThread
from engine.pace import Pace, first_rows
from engine.scheduler import LONG_TURN_S, Ask, Scheduler, Steps, Turns

NAME = "work"


class RecordingRunner:
    """Stands for a TextRunner: keeps who was in which step, and waits for leave when told to."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.has_begun, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()
        self.poisoned: set[int] = set()

    def run(self, blocks: Sequence[Block]) -> list[Output]:
        self.steps.append([block.position for block in blocks])
        self.has_begun.set()
        assert self.may_go.wait(5)
        if self.poisoned & {block.position for block in blocks}:
            raise ValueError("poisoned")
        none = torch.empty(0)
        return [Output(none, none, [block.position * 10], None) for block in blocks]


class Bench:
    """A scheduler over a recording runner; steps have room for `max_rows`."""

    def __init__(self, max_rows: int = 100) -> None:
        self.device = DeviceThread()
        self.runner = RecordingRunner()
        self.scheduler = Scheduler(self.device, max_rows=max_rows)

    def chain(self, name: int, length: int, num_rows: int = 1) -> Steps[list[int]]:
        seen = list[int]()
        for _ in range(length):
            output = yield self.ask(name, num_rows)
            seen += output.likeliest
        return seen

    def ask(self, name: int, num_rows: int = 1) -> Ask:
        runner: Any = self.runner
        kv: Any = SimpleNamespace()
        return Ask(runner, Block(kv, [0] * num_rows, position=name))

    async def held(self) -> asyncio.Task[list[int]]:
        """Starts a step of work 0 that waits, so that what is submitted now meets in the queue."""
        self.runner.may_go.clear()
        task = asyncio.create_task(self.scheduler.steps(self.chain(0, 1), NAME))
        assert await asyncio.to_thread(self.runner.has_begun.wait, 5)
        return task

    async def submit(self, *works: Steps[list[int]]) -> list[asyncio.Task[list[int]]]:
        tasks = [asyncio.create_task(self.scheduler.steps(work, NAME)) for work in works]
        await asyncio.sleep(0)
        return tasks


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.runner.may_go.set()
    made.device.close()


async def test_what_is_ready_runs_in_one_step_and_chains_go_on_in_lockstep(bench: Bench) -> None:
    first = await bench.held()
    tasks = await bench.submit(bench.chain(1, 3), bench.chain(2, 1), bench.chain(3, 2))
    bench.runner.may_go.set()
    assert await asyncio.gather(first, *tasks) == [[0], [10] * 3, [20], [30] * 2]
    assert bench.runner.steps == [[0], [1, 2, 3], [1, 3], [1]]
    assert bench.scheduler.num_live == 0


async def test_a_lone_answer_waits_for_nobody(bench: Bench) -> None:
    assert await bench.scheduler.steps(bench.chain(7, 2), NAME) == [70, 70]
    assert bench.runner.steps == [[7], [7]]


async def test_what_has_no_room_is_first_in_the_next_step() -> None:
    bench = Bench(max_rows=10)
    first = await bench.held()
    tasks = await bench.submit(*(bench.chain(name, 2, num_rows=6) for name in (1, 2)), bench.chain(3, 1, num_rows=50))
    bench.runner.may_go.set()
    await asyncio.gather(first, *tasks)
    assert bench.runner.steps == [[0], [1], [2], [3], [1], [2]]
    bench.device.close()


async def test_cancelled_work_ends_after_the_running_step_and_before_what_frees_its_memory(bench: Bench) -> None:
    first = await bench.held()
    gone, other = await bench.submit(bench.chain(1, 3), bench.chain(2, 1))
    gone.cancel()
    await asyncio.sleep(0)
    freed_at = bench.device.submit(lambda: len(bench.runner.steps))
    bench.runner.may_go.set()
    assert [await first, await other] == [[0], [20]]
    assert freed_at.result(5) == 1
    assert bench.runner.steps == [[0], [2]]
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_work_that_fails_fails_alone(bench: Bench) -> None:
    bench.runner.poisoned = {2}
    first = await bench.held()
    tasks = await bench.submit(*(bench.chain(name, 1) for name in (1, 2, 3)))
    bench.runner.may_go.set()
    results = await asyncio.gather(first, *tasks, return_exceptions=True)
    assert [str(one) for one in results] == ["[0]", "[10]", "poisoned", "[30]"]


async def test_an_error_of_the_work_itself_reaches_its_caller(bench: Bench) -> None:
    def failing() -> Steps[None]:
        yield bench.ask(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await bench.scheduler.steps(failing(), NAME)
    assert await bench.scheduler.steps(bench.chain(1, 1), NAME) == [10]


async def test_turns_alternate_with_steps_and_between_old_and_short_work(bench: Bench) -> None:
    done: list[str] = []

    def long(name: str, pieces: int) -> Turns[str]:
        for left in range(pieces, 0, -1):
            turn_s = yield left
            assert 0 < turn_s <= LONG_TURN_S
            done.append(name)
            bench.runner.steps.append([-1])
        return name

    first = await bench.held()
    video = asyncio.create_task(bench.scheduler.turns(long("video", 6), NAME))
    question = asyncio.create_task(bench.scheduler.turns(long("question", 2), NAME))
    await asyncio.sleep(0)
    rounds = await bench.submit(bench.chain(1, 1))
    bench.runner.may_go.set()
    assert await asyncio.gather(first, video, question, *rounds) == [[0], "video", "question", [10]]
    assert bench.runner.steps[1] == [1]  # the answer's round does not wait for a turn
    assert done[:4].count("question") == 2
    assert done[4:] == ["video"] * 4


async def test_a_long_chain_leaves_turns_their_share(bench: Bench) -> None:
    def pieces() -> Turns[int]:
        yield 2
        yield 1
        return len(bench.runner.steps)

    def slow_chain() -> Steps[int]:
        for _ in range(200):
            yield bench.ask(1)
            threading.Event().wait(0.001)
        return len(bench.runner.steps)

    chain = asyncio.create_task(bench.scheduler.steps(slow_chain(), NAME))
    ended_at = await bench.scheduler.turns(pieces(), NAME)
    assert 0 < ended_at < 200
    assert await chain == 200


async def test_a_closed_device_ends_what_is_live(bench: Bench) -> None:
    first = await bench.held()
    (other,) = await bench.submit(bench.chain(1, 5))
    closing = asyncio.create_task(asyncio.to_thread(bench.device.close))
    await asyncio.sleep(0.05)
    bench.runner.may_go.set()
    await closing
    assert await first == [0]
    for late in (other, bench.scheduler.steps(bench.chain(2, 1), NAME)):
        with pytest.raises(RuntimeError, match="closed"):
            await late
    assert bench.scheduler.num_live == 0


def test_a_pace_learns_what_fits() -> None:
    pace = Pace(first=8, most=100)
    assert pace.num_rows(0.01, left=1000) == 8
    with pace.piece(8):
        threading.Event().wait(0.004)
    assert 1 <= pace.num_rows(0.01, left=1000) <= 20
    assert pace.num_rows(1.0, left=3) == 3
    assert pace.num_rows(100.0, left=1000) == 100
    assert pace.num_rows(0.0, left=1000) == 1
    assert pace.total_s >= 0.004
    assert Pace(first=8, most=100, is_fixed=True).num_rows(0.0, left=1000) == 100
    assert first_rows(10**9) == 8
