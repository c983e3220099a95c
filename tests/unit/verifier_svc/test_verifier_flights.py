"""Single flight, its progress, and the worker stream under it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from verifier_svc.flights import Flights
from verifier_svc.progress import Progress, ProgressBoard, Stage
from verifier_svc.workers import iterate_in_worker


class Job:
    """A job that runs until it is let go, and counts its starts and ends."""

    def __init__(self) -> None:
        self.starts = self.ends = self.inputs_done = 0
        self.gate = asyncio.Event()

    async def run(self, board: ProgressBoard) -> str:
        self.starts += 1
        board.report(Stage.DECODE, 1, 2)
        try:
            await self.gate.wait()
            return "done"
        finally:
            self.ends += 1

    async def call(self, flights: Flights[str]) -> str:
        async with flights.join("key", self.run, on_done=self.count_inputs) as flight:
            return await flight.result()

    def count_inputs(self) -> None:
        self.inputs_done += 1


async def test_callers_share_one_job_and_each_is_told_when_its_inputs_are_free() -> None:
    flights: Flights[str] = Flights()
    job = Job()
    calls = [asyncio.create_task(job.call(flights)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (job.starts, job.inputs_done) == (1, 2)
    calls[0].cancel()  # the one that started it
    await asyncio.gather(calls[0], return_exceptions=True)
    assert job.ends == 0
    job.gate.set()
    assert await asyncio.gather(*calls[1:]) == ["done", "done"]
    assert (job.starts, job.ends, job.inputs_done, flights.num_running) == (1, 1, 3, 0)


async def test_the_last_caller_to_leave_ends_the_job() -> None:
    flights: Flights[str] = Flights()
    job = Job()
    calls = [asyncio.create_task(job.call(flights)) for _ in range(2)]
    await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    # A newcomer does not board a job that is being cancelled.
    job.gate.set()
    assert await job.call(flights) == "done"
    assert (job.starts, job.ends) == (2, 2)


async def test_an_error_is_every_callers_and_the_next_call_starts_afresh() -> None:
    flights: Flights[str] = Flights()

    async def fail(board: ProgressBoard) -> str:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    async def call() -> str:
        async with flights.join("key", fail, on_done=lambda: None) as flight:
            return await flight.result()

    errors = await asyncio.gather(call(), call(), return_exceptions=True)
    assert [str(error) for error in errors] == ["no", "no"]
    with pytest.raises(ValueError, match="no"):
        await call()


async def test_drain_cancels_what_runs() -> None:
    flights: Flights[str] = Flights()
    job = Job()
    call = asyncio.create_task(job.call(flights))
    await asyncio.sleep(0.01)
    await flights.drain()
    assert (job.ends, flights.num_running) == (1, 0)
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_progress_is_thinned_out_but_its_end_is_always_told() -> None:
    board = ProgressBoard()

    async def work() -> None:
        for stage in (Stage.DECODE, Stage.ENCODE):
            for done in range(1, 101):
                board.report(stage, done, 100)
                await asyncio.sleep(0.001)
        board.close()

    working = asyncio.create_task(work())
    seen = [progress async for progress in board.watch(min_interval_s=0.05)]
    await working
    assert seen[-1] == Progress(Stage.ENCODE, 100, 100)
    assert Progress(Stage.DECODE, 100, 100) in seen
    assert 3 <= len(seen) <= 16
    assert [progress.stage.value for progress in seen] == sorted(progress.stage.value for progress in seen)


async def test_a_finished_job_does_not_wait_for_the_interval() -> None:
    board = ProgressBoard()
    board.report(Stage.DECODE, 1, 1)
    asyncio.get_running_loop().call_later(0.02, board.close)
    before = time.monotonic()
    assert [progress async for progress in board.watch(min_interval_s=30)] == [Progress(Stage.DECODE, 1, 1)]
    assert time.monotonic() - before < 5


@pytest.fixture
def executor() -> Generator[ThreadPoolExecutor, None, None]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


class Numbers:
    """A generator that knows whether it was closed."""

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.is_closed = False
        self.produced = 0
        self._fail_at = fail_at

    def __iter__(self) -> Generator[int, None, None]:
        try:
            for number in range(5):
                if number == self._fail_at:
                    raise ValueError("broken")
                time.sleep(0.01)
                self.produced += 1
                yield number
        finally:
            self.is_closed = True


def stream(executor: ThreadPoolExecutor, numbers: Numbers) -> contextlib.aclosing[AsyncIterator[int]]:
    return contextlib.aclosing(iterate_in_worker(executor, iter(numbers)))  # type: ignore[arg-type,type-var]


async def test_a_worker_stream_yields_everything(executor: ThreadPoolExecutor) -> None:
    numbers = Numbers()
    async with stream(executor, numbers) as items:
        assert [item async for item in items] == [0, 1, 2, 3, 4]
    assert numbers.is_closed


async def test_a_worker_stream_raises_and_closes(executor: ThreadPoolExecutor) -> None:
    numbers = Numbers(fail_at=2)
    with pytest.raises(ValueError, match="broken"):
        async with stream(executor, numbers) as items:
            assert [item async for item in items]
    assert numbers.is_closed


async def test_a_cancelled_worker_stream_is_closed_before_its_caller_goes_on(executor: ThreadPoolExecutor) -> None:
    numbers = Numbers()
    states: list[bool] = []

    async def consume() -> None:
        try:
            async with stream(executor, numbers) as items:
                async for _ in items:
                    await asyncio.sleep(10)
        finally:
            states.append(numbers.is_closed)

    consuming = asyncio.create_task(consume())
    await asyncio.sleep(0.03)
    consuming.cancel()
    await asyncio.gather(consuming, return_exceptions=True)
    assert states == [True]
    assert numbers.produced <= 2
