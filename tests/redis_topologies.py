"""Redis as a cluster of three masters, and as a master with a replica that a sentinel watches. Real processes."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import redis

from bench.redis_server import redis_binary
from foveate.store.address import parse_redis_url
from foveate.store.client import StoreSettings

_NUM_SLOTS = 16384
_BUS_OFFSET = 10_000  # of a cluster node's second port, which must be free as well
SERVICE = "main"


class Topology(Protocol):
    """A running Redis of several processes."""

    @property
    def url(self) -> str: ...

    def flush(self) -> None: ...


class Cluster:
    """Three masters that share the slots evenly."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def flush(self) -> None:
        for port in self.ports:
            with node(port) as client:
                client.flushall()

    def num_keys(self) -> list[int]:
        """Keys on each node."""
        counts = []
        for port in self.ports:
            with node(port) as client:
                counts.append(int(client.dbsize()))  # type: ignore[arg-type]
        return counts

    def move(self, key: str) -> None:
        """Moves the slot of a key, with all that is in it, to the next node, as `redis-cli --cluster reshard` does."""
        with contextlib.ExitStack() as stack:
            clients: list[Any] = [stack.enter_context(node(port)) for port in self.ports]
            ids = [client.execute_command("CLUSTER MYID").decode() for client in clients]
            slot = clients[0].execute_command("CLUSTER KEYSLOT", key)
            (source,) = [at for at, one in enumerate(clients) if one.execute_command("CLUSTER COUNTKEYSINSLOT", slot)]
            target = (source + 1) % len(clients)
            clients[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
            clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
            names = clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 10_000)
            clients[source].execute_command("MIGRATE", "127.0.0.1", self.ports[target], "", 0, 5000, "KEYS", *names)
            for client in (clients[target], clients[source], *clients):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])


class Watched:
    """A master and a replica; the sentinel says which is which."""

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]], sentinel: int) -> None:
        self.sentinel = sentinel
        self._processes = processes

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel}/{SERVICE}"

    @property
    def master(self) -> int:
        with node(self.sentinel) as client:
            found: Any = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
            return int(found[1])

    def flush(self) -> None:
        with node(self.master) as client:
            client.flushall()

    def fail_over(self) -> None:
        """Makes the replica, which has everything, the master; the old master is gone."""
        before = self.master
        (after,) = [port for port in self._processes if port != before]
        with node(before) as client:
            assert client.wait(1, 5000) == 1
        _until(self._promotes)
        _until(lambda: self.master == after)
        self._processes[before].kill()
        self._processes[before].wait()

    def _promotes(self) -> bool:
        try:
            with node(self.sentinel) as client:
                return bool(client.execute_command("SENTINEL FAILOVER", SERVICE))
        except redis.exceptions.ResponseError:  # the sentinel does not know the replica well enough yet
            return False


def settings(url: str, **changes: Any) -> StoreSettings:
    """Deadlines that a busy test machine keeps."""
    return StoreSettings(parse_redis_url(url), **{"timeout_s": 5.0, "breaker_s": 0.2, **changes})


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Runs a cluster for the length of the block."""
    ports = [_free_pair() for _ in range(3)]
    share = -(-_NUM_SLOTS // len(ports))
    with contextlib.ExitStack() as stack:
        for at, port in enumerate(ports):
            stack.enter_context(_running(folder, port, "--cluster-enabled", "yes", "--cluster-node-timeout", "5000"))
            with node(port) as client:
                slots = range(at * share, min(_NUM_SLOTS, (at + 1) * share))
                client.execute_command("CLUSTER ADDSLOTS", *slots)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", at + 1)
        with node(ports[0]) as client:
            for port in ports[1:]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", port)
        for port in ports:
            _until(lambda port=port: _is_whole(port, len(ports)))  # type: ignore[misc]
        yield Cluster(ports)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """Runs master, replica and sentinel for the length of the block."""
    master, replica, sentinel = _free_pair(), _free_pair(), _free_pair()
    config = folder / "sentinel.conf"
    config.write_text(
        f"sentinel monitor {SERVICE} 127.0.0.1 {master} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 5000\n"
        f"sentinel failover-timeout {SERVICE} 10000\n"
    )
    with (
        _running(folder, master) as first,
        _running(folder, replica, "--replicaof", "127.0.0.1", str(master)) as second,
    ):
        _until(lambda: _info(replica).get("master_link_status") == "up")
        with _running(folder, sentinel, "--sentinel", config=config):
            started = Watched({master: first, replica: second}, sentinel)
            _until(lambda: started.master == master and _num_replicas(sentinel) == 1)
            yield started


def node(port: int) -> redis.Redis:
    """A client of one process."""
    return redis.Redis(port=port, socket_timeout=10)


@contextlib.contextmanager
def _running(folder: Path, port: int, *arguments: str, config: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    own = folder / str(port)
    own.mkdir()
    command = [redis_binary(), *([str(config)] if config else []), "--port", str(port), "--bind", "127.0.0.1"]
    if config is None:
        command += ["--save", "", "--appendonly", "no"]
    with (own / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--dir", str(own), *arguments], stdout=log, stderr=log)
        try:
            _until(lambda: _answers(port, process))
            yield process
        finally:
            process.kill()
            process.wait()


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "redis-server ended"
    try:
        with node(port) as client:
            return bool(client.ping())
    except redis.exceptions.ConnectionError:
        return False


def _is_whole(port: int, num_nodes: int) -> bool:
    with node(port) as client:
        info: Any = client.execute_command("CLUSTER INFO")
    return info.get("cluster_state") == "ok" and int(info["cluster_known_nodes"]) == num_nodes


def _info(port: int) -> dict[str, Any]:
    with node(port) as client:
        found: Any = client.info("replication")
    return dict(found)


def _num_replicas(sentinel: int) -> int:
    with node(sentinel) as client:
        found: Any = client.execute_command("SENTINEL MASTER", SERVICE)
    return int(found["num-slaves"])


def _until(is_so: Callable[[], bool], *, within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.02)


def _free_pair() -> int:
    """Returns a free port whose bus port is free as well."""
    while True:
        port = random.randint(20_000, 32_000)
        try:
            for one in (port, port + _BUS_OFFSET):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", one))
        except OSError:
            continue
        return port
