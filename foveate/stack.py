"""A whole local stack: verifier, drafter and gateway as child processes of this one.

start     verifier and drafter side by side, then the gateway, then SERVING
stop      gateway, drafter, verifier: whoever reads memory goes before its owner
a crash   of verifier or gateway raises in `check`; a lost drafter is only reported, answers go on without it
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from foveate.client import Client
from foveate.rpc.channel import CHANNEL_OPTIONS
from foveate.rpc.errors import FailedPrecondition, NotFound, from_rpc_error
from foveate.service_process import ServiceProcess, StackError
from foveate.v1 import verifier_pb2, verifier_pb2_grpc

__all__ = ["Stack", "StackAddresses", "StackConfig", "StackError"]

_ENGINE_MODULES = ("torch", "torchvision", "transformers", "av")
_SERVING_POLL_S = 0.05
ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True)
class StackConfig:
    """What to start. `address` is the gateway's; the other services always take a free port of the loopback.

    `small_model` is a smaller checkpoint of the family, for drafts from a pruned video. `extra_arguments` of a service
    are given to its command as they are.
    """

    model: Path
    address: str = ANY_PORT
    media_root: Path | None = None
    pool_mib: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    deterministic: bool = False
    use_drafter: bool = True
    redis_url: str | None = None
    small_model: Path | None = None
    pin: bool = False
    num_threads: int | None = None
    log_dir: Path | None = None
    start_timeout_s: float = 180.0
    stop_grace_s: float = 10.0
    extra_verifier_arguments: tuple[str, ...] = ()
    extra_drafter_arguments: tuple[str, ...] = ()
    extra_gateway_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class StackAddresses:
    """Where the services listen, "host:port"."""

    gateway: str
    verifier: str
    drafter: str | None


class Stack:
    """Starts on `start` or on entering the `with` block, and always stops on leaving it."""

    def __init__(self, config: StackConfig) -> None:
        self._config = config
        self._directory: Path | None = None
        self._addresses: StackAddresses | None = None
        self.gateway: ServiceProcess | None = None
        self.drafter: ServiceProcess | None = None
        self.verifier: ServiceProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def addresses(self) -> StackAddresses:
        """Where the services listen. Raises StackError before `start` has ended."""
        if self._addresses is None:
            raise StackError("the stack is not running")
        return self._addresses

    @property
    def processes(self) -> tuple[ServiceProcess, ...]:
        """The services that were started, in the order in which they stop."""
        return tuple(process for process in (self.gateway, self.drafter, self.verifier) if process is not None)

    def start(self, on_step: Callable[[str], None] = lambda step: None) -> None:
        """Starts everything and waits until it serves; `on_step` hears what is being waited for.

        Raises FailedPrecondition without the engine's packages, NotFound without the model, StackError when the
        address is taken or a service fails. Nothing is left running then.
        """
        check_engine()
        check_model(self._config.model)
        if self._config.small_model is not None:
            check_model(self._config.small_model)
        check_address(self._config.address)
        try:
            self._start(on_step)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops every service and removes what they left. Idempotent."""
        try:
            for process in self.processes:
                process.stop(self._config.stop_grace_s)
        finally:
            self._addresses = None
            self._keep_logs()
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)

    def check(self) -> None:
        """Raises StackError when the verifier or the gateway is gone."""
        for process in (self.gateway, self.verifier):
            if process is not None:
                process.check()

    @property
    def is_drafter_alive(self) -> bool:
        """Whether a drafter was started and runs."""
        return self.drafter is not None and self.drafter.is_alive

    def num_sequences(self, *, timeout_s: float = 5.0) -> int:
        """Returns how many answers the verifier has open."""
        request = verifier_pb2.GetVerifierInfoRequest()
        with grpc.insecure_channel(self.addresses.verifier, options=CHANNEL_OPTIONS) as channel:
            try:
                info = verifier_pb2_grpc.VerifierServiceStub(channel).GetVerifierInfo(request, timeout=timeout_s)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
        return int(info.num_sequences)

    def _start(self, on_step: Callable[[str], None]) -> None:
        config = self._config
        deadline_s = time.monotonic() + config.start_timeout_s
        self._directory = Path(tempfile.mkdtemp(prefix="foveate-stack-"))
        self.verifier = self._spawn("verifier", "verifier_svc.main", self._verifier_arguments())
        if config.use_drafter:
            self.drafter = self._spawn("drafter", "drafter_svc.main", self._drafter_arguments())
        if config.pin:
            self._pin()
        on_step(f"loading {config.model.name}")
        verifier = f"127.0.0.1:{self.verifier.wait_ready(deadline_s)}"
        drafter = None if self.drafter is None else f"127.0.0.1:{self.drafter.wait_ready(deadline_s)}"
        arguments = ["--verifier", verifier, *(() if drafter is None else ("--drafter", drafter))]
        arguments += ["--address", config.address, *self._redis_arguments(), *config.extra_gateway_arguments]
        on_step("starting the gateway")
        self.gateway = self._spawn("gateway", "gateway.main", arguments)
        gateway = f"{_loopback(config.address)}:{self.gateway.wait_ready(deadline_s)}"
        self._wait_serving(gateway, deadline_s)
        self._addresses = StackAddresses(gateway, verifier, drafter)

    def _spawn(self, name: str, module: str, arguments: Sequence[str]) -> ServiceProcess:
        assert self._directory is not None
        return ServiceProcess(name, module, arguments, directory=self._directory, environ=os.environ)

    def _verifier_arguments(self) -> list[str]:
        config = self._config
        arguments = [*self._engine_arguments(), *(("--deterministic",) if config.deterministic else ())]
        if config.small_model is not None:
            arguments.append("--keep-patches")
        if config.media_root is not None:
            arguments += ["--media-root", str(config.media_root)]
        if config.pool_mib is not None:
            arguments += ["--pool-mib", str(config.pool_mib)]
        return [*arguments, *self._redis_arguments(), *config.extra_verifier_arguments]

    def _redis_arguments(self) -> list[str]:
        return [] if self._config.redis_url is None else ["--redis", self._config.redis_url]

    def _drafter_arguments(self) -> list[str]:
        small = self._config.small_model
        arguments = [] if small is None else ["--small-model", str(small)]
        return [*self._engine_arguments(), *arguments, *self._config.extra_drafter_arguments]

    def _engine_arguments(self) -> list[str]:
        config = self._config
        arguments = ["--model", str(config.model), "--address", ANY_PORT, "--device", config.device]
        if config.dtype is not None:
            arguments += ["--dtype", config.dtype]
        return arguments + ([] if config.num_threads is None else ["--threads", str(config.num_threads)])

    def _pin(self) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        half = len(cpus) // 2
        if half and self.verifier is not None and self.drafter is not None:
            self.verifier.pin(cpus[:half])
            self.drafter.pin(cpus[half:])

    def _wait_serving(self, address: str, deadline_s: float) -> None:
        with Client(address) as client:
            while not (client.is_serving(timeout_s=1.0) and self._has_what_was_started(client)):
                self.check()
                if time.monotonic() > deadline_s:
                    raise StackError("the gateway did not get to SERVING in time", reason="STACK_START_TIMEOUT")
                time.sleep(_SERVING_POLL_S)

    def _has_what_was_started(self, client: Client) -> bool:
        """A drafter that was started and lives is waited for: the first answer should not go without it."""
        return not self.is_drafter_alive or client.server_info().drafter_ready

    def _keep_logs(self) -> None:
        if self._config.log_dir is None:
            return
        self._config.log_dir.mkdir(parents=True, exist_ok=True)
        for process in self.processes:
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(process.log_path, self._config.log_dir)


def check_engine() -> None:
    """Raises FailedPrecondition, with the remedy, when the packages of the engine are not installed."""
    missing = [module for module in _ENGINE_MODULES if importlib.util.find_spec(module) is None]
    if missing:
        raise FailedPrecondition(
            f"a local stack needs the engine ({', '.join(missing)} missing): pip install 'foveate[engine]'",
            reason="ENGINE_MISSING",
        )


def check_model(path: Path) -> None:
    """Raises NotFound when `path` is no checkpoint folder."""
    if not (path / "config.json").is_file():
        raise NotFound(
            f"no checkpoint at {path} (a folder with config.json is needed)",
            reason="CHECKPOINT_NOT_FOUND",
            resource=("checkpoint", str(path)),
        )


def check_address(address: str) -> None:
    """Raises StackError when `address` cannot be listened on: better now than after the model is loaded."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except (OSError, OverflowError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "not HOST:PORT"
            raise StackError(f"the gateway cannot listen on {address}: {why}", reason="ADDRESS_UNUSABLE") from None


def _loopback(address: str) -> str:
    host = address.rpartition(":")[0]
    return "127.0.0.1" if host in ("", "0.0.0.0", "[::]") else host
