"""Real processes on one Redis: verifiers and gateways that can be killed and started again, on ports that stay."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from bench.redis_server import RedisServer
from foveate.client import Client
from foveate.service_process import ServiceProcess

_START_S = 120.0


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """A service on a port of its own; `start` after `kill` takes the same one."""

    def __init__(self, name: str, module: str, arguments: list[str], folder: Path) -> None:
        self.name = name
        self.port = free_port()
        self._module = module
        self._arguments = [*arguments, "--address", f"127.0.0.1:{self.port}"]
        self._folder = folder
        self._num_starts = 0
        self._process: ServiceProcess | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begins to start; `wait` waits for it."""
        self._num_starts += 1
        directory = self._folder / f"{self.name}-{self._num_starts}"
        directory.mkdir()
        self._process = ServiceProcess(
            self.name, self._module, self._arguments, directory=directory, environ=os.environ
        )

    def wait(self) -> None:
        """Waits until the service is ready."""
        assert self._process is not None
        self._process.wait_ready(time.monotonic() + _START_S)

    def kill(self) -> None:
        """SIGKILL, and away with what it leaves."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.stop(0.0)

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """Stops the process for the length of the block: it is there, takes calls, and answers none."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Ends the service, if it runs."""
        if self._process is not None:
            self._process.stop(10.0)


class Fleet:
    """Two verifiers and two gateways on one Redis."""

    def __init__(
        self, model: Path, media_root: Path, redis: RedisServer, folder: Path, *, num_gateways: int = 2
    ) -> None:
        store = ["--redis", redis.url, "--redis-timeout-ms", "5000", "--redis-breaker-s", "1"]
        engine = ["--model", str(model), "--deterministic", "--pool-mib", "96", "--media-root", str(media_root)]
        self.verifiers = [
            Service(f"verifier{index}", "verifier_svc.main", [*engine, *store], folder) for index in range(2)
        ]
        addresses = ",".join(one.address for one in self.verifiers)
        self.gateways = [
            Service(
                f"gateway{index}", "gateway.main", ["--verifier", addresses, "--failover-wait-s", "60", *store], folder
            )
            for index in range(num_gateways)
        ]

    @property
    def services(self) -> list[Service]:
        return [*self.verifiers, *self.gateways]

    def client(self, index: int = 0) -> Client:
        """A client of one of the gateways."""
        return Client(self.gateways[index].address, timeout_s=120)

    def wait_ready(self, num_verifiers: int = 2) -> None:
        """Waits until every gateway sees that many verifiers."""
        deadline_s = time.monotonic() + _START_S
        for gateway in self.gateways:
            with Client(gateway.address, timeout_s=5) as client:
                while not (client.is_serving() and client.server_info().num_verifiers == num_verifiers):
                    assert time.monotonic() < deadline_s, "the fleet did not get ready"
                    time.sleep(0.05)


@contextlib.contextmanager
def running(fleet: Fleet) -> Iterator[Fleet]:
    """Starts everything, and ends it again."""
    try:
        for service in fleet.services:
            service.start()
        for service in fleet.services:
            service.wait()
        fleet.wait_ready()
        yield fleet
    finally:
        for service in reversed(fleet.services):
            service.stop()
