"""A TCP proxy before Redis that makes it slow, deaf, or cuts a connection in the middle of a value."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class RedisProxy:
    """Relays to `port` of the loopback; its settings may be changed at any time."""

    def __init__(self, port: int) -> None:
        self.target_port = port
        self.port = 0
        self.delay_s = 0.0  # before every piece of a reply
        self.cut_after_bytes: int | None = None  # of replies, counted from when it was set
        self.is_deaf = False  # takes requests and answers nothing
        self.num_connections = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, upstream}
        try:
            await asyncio.gather(self._requests(reader, upstream), self._replies(upstream_reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for one in (writer, upstream):
                self._writers.discard(one)
                one.close()

    async def _requests(self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            upstream.write(data)
            await upstream.drain()
        upstream.close()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            while self.is_deaf:  # noqa: ASYNC110 - a switch of the test's
                await asyncio.sleep(0.01)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.cut_after_bytes is not None:
                data = data[: self.cut_after_bytes]
                self.cut_after_bytes -= len(data)
            writer.write(data)
            await writer.drain()
            if self.cut_after_bytes == 0:
                self.cut_after_bytes = None
                break
        writer.close()

    def close_all(self) -> None:
        for writer in list(self._writers):
            writer.close()


@contextlib.asynccontextmanager
async def redis_proxy(port: int) -> AsyncIterator[RedisProxy]:
    """Runs a proxy for the length of the block."""
    proxy = RedisProxy(port)
    server = await asyncio.start_server(proxy.relay, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        proxy.is_deaf = False
        proxy.close_all()
        server.close()
        await asyncio.sleep(0.02)
