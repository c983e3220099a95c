"""One thread, in order, whatever the callers do."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import weakref

import pytest

from engine.device_thread import DeviceThread


async def test_work_runs_in_order_in_one_other_thread() -> None:
    device = DeviceThread()
    seen: list[int] = []
    threads = set()

    def work(number: int) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.001 * (5 - number))
        seen.append(number)
        return number * 10

    results = await asyncio.gather(*(device.run(work, number) for number in range(5)))
    assert results == [0, 10, 20, 30, 40]
    assert seen == list(range(5))
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    device.close()


async def test_cancelled_callers_do_not_keep_work_from_running() -> None:
    device = DeviceThread()
    started, release, done = threading.Event(), threading.Event(), []

    def first() -> None:
        started.set()
        release.wait(5)
        done.append("first")

    tasks = [asyncio.create_task(device.run(first)), asyncio.create_task(device.run(done.append, "second"))]
    assert await asyncio.to_thread(started.wait, 5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == []
    release.set()
    device.close()
    assert done == ["first", "second"]


async def test_errors_and_context_variables_travel() -> None:
    device = DeviceThread()
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("mine")
    assert await device.run(variable.get) == "mine"

    def fail() -> None:
        raise ValueError("from the thread")

    with pytest.raises(ValueError, match="from the thread"):
        await device.run(fail)
    assert await device.run(lambda: 1) == 1
    device.close()


async def test_the_loop_stays_free() -> None:
    device = DeviceThread()
    task = asyncio.create_task(device.run(time.sleep, 0.3))
    begin = time.monotonic()
    await asyncio.sleep(0.01)
    assert time.monotonic() - begin < 0.2
    await task
    device.close()


async def test_what_a_function_holds_is_freed_when_it_has_run() -> None:
    class Held:
        pass

    device, held = DeviceThread(), Held()
    gone = weakref.ref(held)
    await device.run(lambda one: None, held)
    del held
    await device.run(lambda: None)
    assert gone() is None
    device.close()


async def test_submitted_work_cannot_be_cancelled_and_is_counted() -> None:
    device, release = DeviceThread(), threading.Event()
    blocker, behind = device.submit(release.wait, 5), device.submit(lambda: "ran")
    assert not behind.cancel()
    assert device.num_waiting == 2
    release.set()
    assert await asyncio.wrap_future(behind) == "ran"
    assert blocker.done()
    assert device.num_waiting == 0
    device.close()


async def test_a_closed_thread_takes_no_work() -> None:
    device = DeviceThread()
    future = device.submit(lambda: 7)
    device.close()
    device.close()
    assert future.result(timeout=0) == 7
    assert device.num_waiting == 0
    with pytest.raises(RuntimeError, match="closed"):
        device.submit(lambda: None)
    with pytest.raises(RuntimeError, match="closed"):
        await device.run(lambda: None)


def test_a_loop_that_closed_while_work_ran_does_not_end_the_thread() -> None:
    device, release = DeviceThread(), threading.Event()

    async def leave() -> None:
        task = asyncio.create_task(device.run(release.wait, 5))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    release.set()
    assert device.submit(lambda: "alive").result(timeout=5) == "alive"
    device.close()
