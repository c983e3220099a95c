"""The services of a run: killed and started again at the same addresses, each behind a proxy that can do harm."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import trustme

from bench.chaos import private
from bench.chaos.clocks import Clock
from bench.fault_proxy import FaultProxy
from bench.redis_server import RedisServer
from foveate.checkpoints import default_checkpoint
from foveate.client import Client
from foveate.rpc.channel import open_sync_channel
from foveate.rpc.errors import FoveateError
from foveate.rpc.security import ClientTls
from foveate.service_process import SHM_DIR, ServiceProcess, StackError
from foveate.store.keys import alive
from foveate.v1 import verifier_pb2, verifier_pb2_grpc

VERIFIERS = ("verifier-a", "verifier-b")
GATEWAYS = ("gateway-a", "gateway-b")
SERVICES = (*VERIFIERS, "drafter", *GATEWAYS)
POOL_MIB = 64
START_S = 240.0
_SETTLE_S = 3.0  # longer than a renewal takes to notice


@dataclass(frozen=True)
class _Leases:
    """How many flights a verifier has lost, and whether its heartbeat is in Redis."""

    num_lost: int
    is_alive: bool


class World:
    """Two gateways, two verifiers, a drafter and a Redis."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.is_private = private.mount(self.disk)
        self.tls = _certificates(folder)
        self.redis = RedisServer(folder)
        self.redis.start()
        self.ports = {name: _free_port() for name in SERVICES}
        self.proxies = {name: FaultProxy(f"127.0.0.1:{port}") for name, port in self.ports.items()}
        self.redis_proxy = FaultProxy(f"127.0.0.1:{self.redis.port}")
        self.clocks = {name: Clock(folder / f"{name}.clock") for name in SERVICES}
        self.num_leases_lost = 0  # because a clock had jumped
        self.processes: dict[str, ServiceProcess] = {}
        self.pids: set[int] = set()
        self._number = 0

    def start(self, name: str) -> None:
        """Starts a service, or starts it again; returns when it listens. Raises StackError when it ends instead."""
        self._number += 1
        own = ["--address", f"127.0.0.1:{self.ports[name]}"]
        own += ["--tls-cert", self.tls.certificate, "--tls-key", self.tls.key, "--tls-client-ca", self.tls.ca]
        redis = ["--redis", f"redis://{self.redis_proxy.address}"]
        if name in GATEWAYS:
            module = "gateway.main"
            own += [
                *self._peers(name),
                *redis,
                "--peer-ca",
                self.tls.ca,
                "--peer-cert",
                self.tls.certificate,
                "--peer-key",
                self.tls.key,
            ]
        elif name in VERIFIERS:
            module = "verifier_svc.main"
            own += ["--model", default_checkpoint(), "--deterministic", "--pool-mib", str(POOL_MIB)]
        else:
            module = "drafter_svc.main"
            own += ["--model", default_checkpoint()]
        if name not in GATEWAYS:
            own += [*redis, "--register", self.proxies[name].address]
        process = ServiceProcess(
            f"{name}-{self._number}",
            module,
            [str(one) for one in own],
            directory=self.folder,
            environ=self.clocks[name].environment(os.environ),
            scratch=self.disk,
        )
        self.pids.add(process.pid)
        self.processes[name] = process
        process.wait_ready(time.monotonic() + START_S)

    def kill(self, name: str, *, restart: bool = True) -> None:
        """Kills a service as the kernel does, and starts it again."""
        process = self.processes[name]
        os.kill(process.pid, signal.SIGKILL)
        process.stop(5)
        if restart:
            self.start(name)

    def leave(self, name: str, for_s: float) -> None:
        """Ends a service in order, as an upgrade does, and brings it back after a while."""
        self.processes[name].stop(15)
        time.sleep(for_s)
        self.start(name)

    def freeze(self, name: str, for_s: float) -> None:
        """Stops a service in its tracks for a while."""
        _freeze(self.processes[name].pid, for_s)

    def freeze_redis(self, for_s: float) -> None:
        """Stops Redis in its tracks for a while."""
        _freeze(self.redis.pid, for_s)

    def restart_redis(self) -> None:
        """Kills Redis, with all that is in it, and starts it again."""
        self.redis.kill()
        self.redis.start()

    def jump_redis_clock(self) -> None:
        """Ends every lease and heartbeat in Redis at once, as a jump of its clock does: their holders are not told."""
        with self.redis.client() as client:
            for pattern in ("foveate:*:flight", "foveate:alive:*"):
                for key in client.scan_iter(pattern):
                    client.pexpire(key, 1)

    def jump_clock(self, name: str, by_s: float, for_s: float) -> None:
        """Sets a service's wall clock for a while: no verifier may lose a lease by it, nor its heart stop.

        What an earlier fault did to leases is waited for.
        """
        time.sleep(_SETTLE_S)
        before = self._leases()
        self.clocks[name].jump_to(by_s)
        time.sleep(for_s)
        self.clocks[name].jump_to(0.0)
        time.sleep(_SETTLE_S)
        after = self._leases()
        self.num_leases_lost += sum(
            max(0, after[one].num_lost - was.num_lost) + (was.is_alive and not after[one].is_alive)
            for one, was in before.items()
            if one in after
        )

    def fill_disk(self, for_s: float) -> None:
        """Takes the room for temporary files away for a while; an upload must be told so."""
        with private.filled(self.disk):
            with self.client(GATEWAYS[0], 10) as client:
                wait(lambda: _is_disk_full(client), limit_s=60)
            time.sleep(for_s)

    def start_without_shm(self, name: str) -> None:
        """Kills a verifier; it must refuse to come back while /dev/shm is full, and come back afterwards."""
        self.kill(name, restart=False)
        with private.filled(SHM_DIR):
            try:
                self.start(name)
            except StackError as error:
                if "are free" not in str(error):
                    raise
            else:
                raise AssertionError("a pool was made without room for it")
        self.start(name)

    def client(self, name: str, timeout_s: float) -> Client:
        """Returns a client of a gateway, through its proxy."""
        return Client(self.proxies[name].address, timeout_s=timeout_s, tls=self.tls)

    def num_open_sequences(self) -> int:
        """Returns how many sequences are still open a while after the last answer."""

        def number() -> int:
            return sum(self._open_sequences(name) for name in VERIFIERS)

        with contextlib.suppress(TimeoutError):
            wait(lambda: number() == 0, limit_s=60)  # a peer that froze is given up after 40 s of silence
        return number()

    def rss_mib(self) -> dict[str, int]:
        """Returns the resident memory of every service."""
        return {
            name: int(psutil.Process(process.pid).memory_info().rss / 2**20) for name, process in self.processes.items()
        }

    def segments(self) -> list[str]:
        """Returns what the services left in shared memory."""
        return [path.name for pid in self.pids for path in SHM_DIR.glob(f"foveate-*-{pid}-*")]

    def close(self) -> None:
        """Ends everything."""
        for name in reversed(SERVICES):
            if name in self.processes:
                self.processes[name].stop(15)
        for proxy in (*self.proxies.values(), self.redis_proxy):
            proxy.close()
        self.redis.kill()

    def _peers(self, name: str) -> list[str]:
        """One gateway has a static list, the other finds who registers."""
        if name == GATEWAYS[1]:
            return ["--verifier", "redis:", "--drafter", "redis:"]
        verifiers = ",".join(self.proxies[one].address for one in VERIFIERS)
        return ["--verifier", verifiers, "--drafter", self.proxies["drafter"].address]

    def _leases(self) -> dict[str, _Leases]:
        """Returns what is known of the leases of every pool that there is now."""
        infos = [self._info(name) for name in VERIFIERS]
        with self.redis.client() as client:
            return {
                info.kv_handle.pool_id: _Leases(
                    info.context_counters.get("flights_lost", 0), bool(client.exists(alive(info.kv_handle.pool_id)))
                )
                for info in infos
            }

    def _open_sequences(self, name: str) -> int:
        return int(self._info(name).num_sequences)

    def _info(self, name: str) -> verifier_pb2.GetVerifierInfoResponse:
        with open_sync_channel(f"127.0.0.1:{self.ports[name]}", self.tls) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            return stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=20)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[World]:
    """Runs a world for the length of the block, from when everything serves."""
    world = World(folder)
    try:
        for name in SERVICES:
            world.start(name)
        for name in GATEWAYS:
            with world.client(name, 30) as client:
                wait(lambda client=client: _is_whole(client))  # type: ignore[misc]
        yield world
    finally:
        world.close()
        if world.is_private:
            # A mount point of the namespace's own; the folder it lies in is removed by the caller.
            os.system(f"umount {world.disk}")


def wait(is_true: Callable[[], bool], *, limit_s: float = START_S) -> None:
    """Waits until something is true. Raises TimeoutError."""
    deadline_s = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(FoveateError):
            if is_true():
                return
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(0.1)


def _is_whole(client: Client) -> bool:
    if not client.is_serving():
        return False
    info = client.server_info()
    return info.drafter_ready and info.num_verifiers == len(VERIFIERS)


def _is_disk_full(client: Client) -> bool:
    try:
        client.create_context_from_bytes(bytes(200_000), fps=4.0)
    except FoveateError as error:
        return error.reason == "DISK_FULL"
    return False


def _freeze(pid: int, for_s: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(for_s)
    finally:
        os.kill(pid, signal.SIGCONT)


def _certificates(folder: Path) -> ClientTls:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    ca, certificate, key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    authority.cert_pem.write_to_path(str(ca))
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    return ClientTls(ca, certificate, key)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
