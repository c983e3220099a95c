"""Who runs next on a device: one forward per step over all answers that are ready, and prefill in turns between steps.

    steps    rounds of answers: what is ready when the device becomes free runs together; nobody waits for company
    turns    long work (prefill, encoding), cut into pieces: while answers run, a piece is about as long as a step

Work is a generator that the device thread drives, so that a chain of drafts, a verification and a prefill look alike.
A step takes the oldest work first, up to a number of rows; what has no room is first in the next step. Turns alternate
between the work that is the oldest and the work with the least left: a question is not held up by a long video, nor a
video by many questions. Functions that were submitted to the device thread, frees among them, run between steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from engine.batch import Block, Output
from engine.device_thread import DeviceThread
from engine.runner import TextRunner
from foveate.telemetry import conventions as names
from foveate.telemetry.spans import UNTOLD, Attributes, SpanLog, current_log

T = TypeVar("T")

# A turn between steps is as long as the step before it, but at least this.
SHORT_TURN_S = 0.004
# A turn while no answer runs: one that arrives waits for its end.
LONG_TURN_S = 0.05
# Answers count as running for this long after their last round.
_QUIET_AFTER_S = 0.25


@dataclass(frozen=True)
class Ask:
    """A block that work wants in the next step of a runner."""

    runner: TextRunner
    block: Block


# Yields what it wants of a step and receives what came out; returns its result.
Steps = Generator[Ask, Output, T]
# Yields how much is left, in any unit that is common to a device's turns, and receives the seconds of its next turn.
Turns = Generator[int, float, T]


@dataclass(eq=False)
class _Job(Generic[T]):
    work: Generator[Any, Any, T]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[T]
    name: str
    attributes: Attributes
    log: SpanLog | None
    asked_ns: int
    start_ns: int = 0
    is_cancelled: bool = False
    ask: Ask | None = None
    left: int = 0


@dataclass
class _Delivery:
    """Results on their way to the event loops; one wake-up for all of a loop's."""

    ended: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, BaseException | None]]] = field(
        default_factory=dict
    )

    def add(self, job: _Job[Any], result: Any, error: BaseException | None) -> None:
        self.ended.setdefault(job.loop, []).append((job.future, result, error))

    def send(self) -> None:
        for loop, results in self.ended.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, results)
        self.ended = {}


class Scheduler:
    """Drives the work of one device thread. `max_rows` bounds a step; a block with more rows runs alone."""

    def __init__(self, device: DeviceThread, *, max_rows: int) -> None:
        self.device = device
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self._incoming: deque[tuple[_Job[Any], bool]] = deque()
        self._is_pumping = False
        # Touched by the device thread only.
        self._steps: deque[_Job[Any]] = deque()
        self._turns: list[_Job[Any]] = []
        self._delivery = _Delivery()
        self._last_step_s = 0.0
        self._last_step_end_s = float("-inf")
        self._owed_s = 0.0
        self._is_oldest_next = True
        self.num_steps = 0
        self.num_blocks = 0

    @property
    def num_live(self) -> int:
        """Amount of work that waits or runs, as seen from any thread."""
        return len(self._incoming) + len(self._steps) + len(self._turns)

    async def steps(self, work: Steps[T], name: str, attributes: Attributes = UNTOLD) -> T:
        """Runs an answer's round to its end. Cancelled, it ends after the step that is running.

        `name` and `attributes` are of the span that a recorded call gets.
        """
        return await self._submit(work, name, attributes, is_turns=False)

    async def turns(self, work: Turns[T], name: str, attributes: Attributes = UNTOLD) -> T:
        """Runs long work to its end, in turns. Cancelled, it ends after the turn that is running."""
        return await self._submit(work, name, attributes, is_turns=True)

    async def _submit(self, work: Generator[Any, Any, T], name: str, attributes: Attributes, *, is_turns: bool) -> T:
        loop = asyncio.get_running_loop()
        log = current_log()
        asked_ns = 0 if log is None else time.time_ns()
        job: _Job[T] = _Job(work, loop, loop.create_future(), name, attributes, log, asked_ns)
        with self._lock:
            self._incoming.append((job, is_turns))
            must_start = not self._is_pumping
            self._is_pumping = True
        if must_start:
            self._pump_soon()
        try:
            return await job.future
        finally:
            job.is_cancelled = True  # no effect on what has ended

    def _pump_soon(self) -> None:
        try:
            self.device.submit(self._pump)
        except RuntimeError as error:  # the thread is closed
            self._abandon(error)

    def _pump(self) -> None:
        """One step and at most one turn, again and again, letting pass what was submitted to the device meanwhile."""
        try:
            while self._run_once():
                if self.device.is_wanted:
                    self._pump_soon()
                    return
        except BaseException as error:  # a bug of ours must not leave callers waiting for ever
            self._abandon(error)
            raise

    def _run_once(self) -> bool:
        """Returns whether there is more to do."""
        self._take_in()
        if self._steps:
            self._step()
            self._delivery.send()
        if self._turns and (not self._steps or self._owed_s >= self._turn_s()):
            self._turn()
        self._delivery.send()
        with self._lock:
            self._is_pumping = self.num_live > 0
            return self._is_pumping

    def _take_in(self) -> None:
        while self._incoming:
            job, is_turns = self._incoming.popleft()
            if job.log is not None:
                job.start_ns = time.time_ns()
            if job.is_cancelled:  # what it would touch may be freed already
                job.work.close()
                continue
            if not self._advance(job, None):
                continue
            if is_turns:
                self._turns.append(job)
            else:
                self._steps.append(job)
        for job in [job for job in (*self._steps, *self._turns) if job.is_cancelled]:
            (self._steps if job in self._steps else self._turns).remove(job)
            job.work.close()

    def _step(self) -> None:
        """Runs the oldest work's blocks, as many as there is room for."""
        begin_s = time.perf_counter()
        taken, num_rows = list[_Job[Any]](), 0
        while self._steps:
            assert self._steps[0].ask is not None
            num_rows += self._steps[0].ask.block.num_rows
            if taken and num_rows > self._max_rows:
                break
            taken.append(self._steps.popleft())
        for runner in dict.fromkeys(job.ask.runner for job in taken if job.ask is not None):
            jobs = [job for job in taken if job.ask is not None and job.ask.runner is runner]
            for job, output in zip(jobs, self._run(runner, jobs), strict=True):
                if self._advance(job, output):
                    self._steps.append(job)
        self.num_steps += 1
        self.num_blocks += len(taken)
        self._last_step_end_s = time.perf_counter()
        self._last_step_s = self._last_step_end_s - begin_s
        self._owed_s += self._last_step_s

    def _run(self, runner: TextRunner, jobs: list[_Job[Any]]) -> list[Output | BaseException]:
        blocks = [job.ask.block for job in jobs if job.ask is not None]
        try:
            return list(runner.run(blocks))
        except Exception as error:
            if len(blocks) == 1:
                return [error]
        # Whose fault it was must not be the others': running a block again writes the same rows again.
        return [self._run(runner, [job])[0] for job in jobs]

    def _turn(self) -> None:
        self._is_oldest_next = not self._is_oldest_next
        job = self._turns[0] if self._is_oldest_next else min(self._turns, key=lambda one: one.left)
        self._owed_s = 0.0
        if not self._advance(job, self._turn_s()):
            self._turns.remove(job)

    def _turn_s(self) -> float:
        if not self._steps and time.perf_counter() - self._last_step_end_s > _QUIET_AFTER_S:
            return LONG_TURN_S
        return min(LONG_TURN_S, max(SHORT_TURN_S, self._last_step_s))

    def _advance(self, job: _Job[Any], value: Output | float | BaseException | None) -> bool:
        """Lets work go on to its next wish; False when it has ended, which its caller is told."""
        try:
            wish = job.work.throw(value) if isinstance(value, BaseException) else job.work.send(value)
        except StopIteration as end:
            self._end(job, end.value, None)
            return False
        except BaseException as error:
            self._end(job, None, error)
            return False
        if isinstance(wish, Ask):
            job.ask = wish
        else:
            job.left = wish
        return True

    def _end(self, job: _Job[Any], result: Any, error: BaseException | None) -> None:
        if job.log is not None:
            queued_us = (job.start_ns - job.asked_ns) // 1000
            more: dict[str, str | int] = {names.QUEUED_US: queued_us, names.THREAD_NAME: "device"}
            job.log.add(job.name, job.start_ns, time.time_ns(), {**job.attributes, **more})
        self._delivery.add(job, result, error)

    def _abandon(self, error: BaseException) -> None:
        with self._lock:
            jobs = [*(job for job, _ in self._incoming), *self._steps, *self._turns]
            for queue in (self._incoming, self._steps, self._turns):
                queue.clear()
            self._is_pumping = False
        for job in jobs:
            job.work.close()
            self._delivery.add(job, None, error)
        self._delivery.send()


def _settle(results: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in results:
        if future.done():  # its caller was cancelled
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
