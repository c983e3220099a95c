"""Messages leave in order, one at a time, beside whatever else runs; what goes wrong is told."""

from __future__ import annotations

import asyncio

import pytest

from gateway.outbox import Outbox


class Socket:
    """Writes when it is let to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.written: list[int] = []
        self.num_writing = 0
        self.ready = asyncio.Event()
        self._fails = fails

    async def write(self, message: int) -> None:
        self.num_writing += 1
        assert self.num_writing == 1, "one at a time"
        try:
            await self.ready.wait()
            if self._fails:
                raise ConnectionError("the client has gone")
            self.written.append(message)
        finally:
            self.num_writing -= 1


async def send(socket: Socket, messages: list[int], *, error: Exception | None = None) -> None:
    async with Outbox(socket.write) as outbox:
        for message in messages:
            await outbox.put(message)
        if error is not None:
            raise error


async def test_one_message_is_on_its_way_and_the_next_one_waits() -> None:
    socket = Socket()
    async with Outbox(socket.write) as outbox:
        await outbox.put(1)
        second = asyncio.create_task(outbox.put(2))
        await asyncio.sleep(0.01)
        assert not second.done()
        socket.ready.set()
        await second
        await outbox.put(3)
    assert socket.written == [1, 2, 3]


@pytest.mark.parametrize("messages", [[1], [1, 2]])
async def test_a_failed_write_is_raised_by_the_next_message_or_at_the_end(messages: list[int]) -> None:
    socket = Socket(fails=True)
    socket.ready.set()
    with pytest.raises(ConnectionError):
        await send(socket, messages)


async def test_what_the_answer_raises_comes_after_what_was_written() -> None:
    socket = Socket()
    task = asyncio.create_task(send(socket, [1], error=ValueError("from the answer")))
    await asyncio.sleep(0.01)
    assert not task.done()
    socket.ready.set()
    with pytest.raises(ValueError, match="from the answer"):
        await task
    assert socket.written == [1]


async def test_the_answers_error_is_told_rather_than_the_sockets() -> None:
    socket = Socket(fails=True)
    socket.ready.set()
    with pytest.raises(ValueError, match="from the answer"):
        await send(socket, [1], error=ValueError("from the answer"))


@pytest.mark.parametrize("num_put", [1, 2])
async def test_a_cancelled_answer_drops_what_it_was_writing(num_put: int) -> None:
    socket = Socket()

    async def answer() -> None:
        async with Outbox(socket.write) as outbox:
            for message in range(num_put):
                await outbox.put(message)
            await asyncio.sleep(10)

    task = asyncio.create_task(answer())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1)
    assert socket.written == []
    assert socket.num_writing == 0
