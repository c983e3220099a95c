"""Is this machine fit to run Foveate, and do the services that run fit together? Every finding says what to do.

Torch-free: what only PyTorch knows (GPUs, peer access) is asked of a child process that may fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import foveate
from foveate.rpc.channel import open_sync_channel
from foveate.rpc.errors import from_rpc_error
from foveate.rpc.security import ClientTls
from foveate.store.address import parse_redis_url
from foveate.store.errors import StoreError
from foveate.store.keys import DEFAULT_FLEET
from foveate.v1 import drafter_pb2, drafter_pb2_grpc, records_pb2, verifier_pb2, verifier_pb2_grpc

SHM = Path("/dev/shm")
_MIB = 2**20
_TIMEOUT_S = 3.0
_LIST_S = 1.0
_MIN_FILES = 4096
_PACKAGES = ("grpcio", "protobuf", "torch", "transformers", "av", "opentelemetry-sdk")
_READ_BACK = "import sys; sys.stdout.write(open(sys.argv[1]).read())"
_ASK_TORCH = """
import json, torch
n = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [{"name": torch.cuda.get_device_name(i), "bytes": torch.cuda.mem_get_info(i)[0]} for i in range(n)]
peers = [[i, j] for i in range(n) for j in range(n) if i != j and not torch.cuda.can_device_access_peer(i, j)]
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus, "no_peer_access": peers}))
"""


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Questions:
    """What to look at beyond the machine itself; empty: not at all."""

    pool_mib: int = 1024
    ports: Sequence[int] = ()
    redis: str = ""
    fleet: str = DEFAULT_FLEET
    verifier: str = ""
    drafter: str = ""
    gateway: str = ""
    tls: ClientTls | None = None
    alloc_conf: str = ""


def examine(questions: Questions) -> list[Finding]:
    """Looks at everything; never raises for what it finds."""
    looks: list[Callable[[Questions], Iterator[Finding]]] = [
        _versions, _files, _shared_memory, _compiler, _gpus, _ports, _redis, _services,
    ]  # fmt: skip
    return [finding for look in looks for finding in look(questions)]


def _versions(_: Questions) -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding(
        "python", Verdict.OK if sys.version_info >= (3, 11) else Verdict.FAIL, python, "install 3.11 or newer"
    )
    have = {name: _version(name) for name in _PACKAGES}
    told = ", ".join(f"{name} {version or 'missing'}" for name, version in have.items())
    yield Finding("packages", Verdict.OK, f"foveate {foveate.__version__}, {told}")
    if not (have["torch"] and have["transformers"] and have["av"]):
        yield Finding("engine", Verdict.WARN, "not installed: this machine can run a gateway only", _pip("engine"))
    if not have["opentelemetry-sdk"]:
        yield Finding("telemetry", Verdict.WARN, "not installed: no traces, no metrics", _pip("telemetry"))


def _files(_: Questions) -> Iterator[Finding]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_good = soft == resource.RLIM_INFINITY or soft >= _MIN_FILES
    remedy = f"ulimit -n {_MIN_FILES} (LimitNOFILE= of a unit, ulimits: of a container)"
    yield Finding("open files", Verdict.OK if is_good else Verdict.WARN, f"limit {soft}", "" if is_good else remedy)


def _shared_memory(questions: Questions) -> Iterator[Finding]:
    if not SHM.is_dir():
        yield Finding("shared memory", Verdict.FAIL, "/dev/shm is not there", "mount a tmpfs at /dev/shm")
        return
    free = shutil.disk_usage(SHM).free
    needed = questions.pool_mib * _MIB
    yield Finding(
        "shared memory",
        Verdict.OK if free >= needed else Verdict.FAIL,
        f"{free // _MIB} MiB free in /dev/shm, a pool of {questions.pool_mib} MiB is wanted",
        "" if free >= needed else "enlarge it (shm_size: in compose, sizeLimit in Kubernetes), or lower --pool-mib",
    )
    yield _read_by_another()


def _read_by_another() -> Finding:
    """Writes through a mapping and reads from another process, as verifier and drafter do."""
    path, text = SHM / f"foveate-doctor-{os.getpid()}", secrets.token_hex(16)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, len(text))
            with mmap.mmap(descriptor, len(text)) as mapped:
                mapped[:] = text.encode()
        finally:
            os.close(descriptor)
        ran = subprocess.run(
            [sys.executable, "-I", "-c", _READ_BACK, path], capture_output=True, timeout=30, check=False
        )
        is_good = ran.stdout.decode() == text
        found = f"another process reads it; namespace {_boot_id()[:8]}:{os.stat(SHM).st_dev}"
        return Finding("shared mapping", Verdict.OK if is_good else Verdict.FAIL, found if is_good else "not readable")
    except OSError as error:
        return Finding("shared mapping", Verdict.FAIL, str(error), "make /dev/shm writable for this user")
    finally:
        path.unlink(missing_ok=True)


def _compiler(_: Questions) -> Iterator[Finding]:
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if found is None:
        yield Finding("C compiler", Verdict.WARN, "none: CPU steps run on PyTorch, slower", "install gcc")
    else:
        yield Finding("C compiler", Verdict.OK, f"{found}: the native CPU step can be built")


def _gpus(questions: Questions) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    ran = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120, check=False)
    if ran.returncode != 0:
        lines = ran.stderr.strip().splitlines()
        yield Finding(
            "GPU", Verdict.FAIL, f"PyTorch cannot look: {lines[-1] if lines else ran.returncode}", "nvidia-smi"
        )
        return
    told = json.loads(ran.stdout)
    if not told["gpus"]:
        why = "built for the CPU" if told["cuda"] is None else "no driver or no device"
        yield Finding("GPU", Verdict.OK, f"none ({why}): run with --device cpu")
        return
    for index, gpu in enumerate(told["gpus"]):
        yield Finding("GPU", Verdict.OK, f"{index}: {gpu['name']}, {gpu['bytes'] // _MIB} MiB free")
    for one, other in told["no_peer_access"]:
        what = f"GPU {one} cannot read GPU {other}"
        yield Finding("peer access", Verdict.WARN, what, "put verifier and drafter on one GPU, or on two that can")
    if "expandable_segments:True" in questions.alloc_conf:
        found = "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, which breaks CUDA IPC"
        yield Finding("CUDA IPC", Verdict.FAIL, found, "take it out for the verifier")


def _ports(questions: Questions) -> Iterator[Finding]:
    for port in questions.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                yield Finding(f"port {port}", Verdict.FAIL, str(error), "choose another, or end what listens there")
            else:
                yield Finding(f"port {port}", Verdict.OK, "free")


def _redis(questions: Questions) -> Iterator[Finding]:
    if not questions.redis:
        return
    try:
        url = urlsplit(questions.redis)
        if url.scheme != "redis" or not url.hostname:
            yield Finding("redis", Verdict.WARN, "only redis://HOST:PORT is asked here", "redis-cli -u URL ping")
            return
        with socket.create_connection((url.hostname, url.port or 6379), _TIMEOUT_S) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.sendall(b"PING\r\n")
            reply = connection.recv(64).decode(errors="replace").strip()
    except (OSError, ValueError) as error:
        yield Finding("redis", Verdict.FAIL, f"does not answer: {error}", "without it there is no cold tier; start it")
        return
    is_there = reply.startswith(("+PONG", "-NOAUTH"))
    yield Finding("redis", Verdict.OK if is_there else Verdict.FAIL, reply, "" if is_there else "that is no Redis")
    if is_there:
        yield from _registered(questions)


def _registered(questions: Questions) -> Iterator[Finding]:
    """Who is in the list of services; nothing when nobody registers there."""
    with contextlib.suppress(StoreError):
        for kind, one in asyncio.run(_listed(questions)):
            host = one.shm_namespace_id[:8] or "unknown"
            told = f"{one.address}: {one.model or 'no model'}, Foveate {one.version}, shared memory of host {host}"
            yield Finding(f"registered {kind}", Verdict.OK, told)


async def _listed(questions: Questions) -> list[tuple[str, records_pb2.ServiceRecord]]:
    # The client of Redis takes 0.2 s to import, and few commands ask Redis.
    from foveate.store.client import Store, StoreSettings
    from foveate.store.services import ServiceKind, registered

    store = Store(StoreSettings(parse_redis_url(questions.redis), timeout_s=_LIST_S))
    try:
        lists = [(kind.value, await registered(store, kind, questions.fleet)) for kind in ServiceKind]
    finally:
        await store.close()
    return [(kind, record) for kind, listed in lists for record in listed.living]


def _services(questions: Questions) -> Iterator[Finding]:
    for name, address in (
        ("gateway", questions.gateway),
        ("verifier", questions.verifier),
        ("drafter", questions.drafter),
    ):
        if address:
            status = health_of(address, questions.tls)
            remedy = "" if status == "SERVING" else "see its log; a model that loads is NOT_SERVING for a while"
            yield Finding(name, Verdict.OK if status == "SERVING" else Verdict.FAIL, f"{address}: {status}", remedy)
    if questions.verifier and questions.drafter:
        yield from _fit(questions)


def _fit(questions: Questions) -> Iterator[Finding]:
    try:
        with open_sync_channel(questions.verifier, questions.tls) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            verifier = stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=_TIMEOUT_S)
        with open_sync_channel(questions.drafter, questions.tls) as channel:
            asked = drafter_pb2_grpc.DrafterServiceStub(channel)
            drafter = asked.GetDrafterInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        yield Finding("fit", Verdict.FAIL, f"cannot be asked: {from_rpc_error(error).message}")
        return
    minor = [version.split(".")[:2] for version in (foveate.__version__, verifier.version, drafter.version)]
    is_good = minor.count(minor[0]) == len(minor)
    versions = f"verifier {verifier.version}, drafter {drafter.version}, here {foveate.__version__}"
    yield Finding(
        "versions", Verdict.OK if is_good else Verdict.FAIL, versions, "" if is_good else "deploy one version"
    )
    is_same = verifier.tokenizer_sha256 == drafter.tokenizer_sha256
    models = f"verifier {verifier.model}, drafter {drafter.model}"
    yield Finding(
        "tokenizers",
        Verdict.OK if is_same else Verdict.FAIL,
        models,
        "" if is_same else "give both checkpoints of one family",
    )
    if verifier.kv_handle.HasField("shm"):
        is_shared = verifier.kv_handle.shm.namespace_id == drafter.shm_namespace_id
        yield Finding(
            "KV sharing",
            Verdict.OK if is_shared else Verdict.WARN,
            "one /dev/shm" if is_shared else "verifier and drafter see different /dev/shm: KV cannot be shared",
            "" if is_shared else "run both on one host with one /dev/shm (ipc: of compose, one pod in Kubernetes)",
        )


def health_of(address: str, tls: ClientTls | None = None, *, service: str = "", timeout_s: float = _TIMEOUT_S) -> str:
    """Returns SERVING, NOT_SERVING, or why the service cannot be asked."""
    try:
        with open_sync_channel(address, tls) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(request, timeout=timeout_s)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    except grpc.RpcError as error:
        return from_rpc_error(error).code.name
    except OSError as error:
        return str(error)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pip(extra: str) -> str:
    return f"pip install 'foveate[{extra}]'"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
