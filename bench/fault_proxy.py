"""A TCP proxy that does to a connection what networks do: delay, cut, corrupt, go silent. Loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

_BLOCK_BYTES = 16384


@dataclass
class Faults:
    """What happens to bytes now; changed while connections run."""

    delay_s: float = 0.0
    is_silent: bool = False  # half-open: everything is swallowed, nothing is closed
    num_to_corrupt: int = 0  # blocks in which a byte is changed


@dataclass
class FaultProxy:
    """Forwards `port` to `target` ("127.0.0.1:PORT"). Runs in a loop of its own thread."""

    target: str
    faults: Faults = field(default_factory=Faults)
    port: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._era = 0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._start())

    @property
    def address(self) -> str:
        """Where to connect."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Resets every connection."""
        self._run(self._cut())

    def forget(self) -> None:
        """Leaves every connection that is open now half-open for good: nothing passes, nothing is closed."""
        self._era += 1

    def close(self) -> None:
        """Ends the proxy."""
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        both = {writer, there_writer}
        self._writers |= both
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the proxy ends
                await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            self._writers -= both
            for one in both:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        era = self._era
        with contextlib.suppress(OSError):
            while data := await reader.read(_BLOCK_BYTES):
                faults = self.faults
                if faults.delay_s:
                    await asyncio.sleep(faults.delay_s)
                while self.faults.is_silent or era != self._era:  # noqa: ASYNC110 - set from another thread
                    await asyncio.sleep(0.05)
                if faults.num_to_corrupt > 0 and len(data) > 20:
                    faults.num_to_corrupt -= 1
                    place = random.randrange(len(data))
                    data = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
