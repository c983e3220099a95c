"""`foveate doctor`, `health` and `new-key`: what they find here, and what they say when something is wrong."""

from __future__ import annotations

import json
import socket
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foveate import doctor
from foveate.cli.main import app
from foveate.doctor import Finding, Questions, Verdict, examine
from foveate.rpc.security import ApiKeys
from tests.unit.foveate.scripted_gateway import ScriptedGateway

RUN = CliRunner()


def found(subject: str, **questions: object) -> Finding:
    (one,) = [one for one in examine(Questions(**questions)) if one.subject == subject]  # type: ignore[arg-type]
    return one


@pytest.fixture(autouse=True)
def no_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting PyTorch in a child takes seconds; one test does."""
    monkeypatch.setattr(doctor, "_gpus", lambda _: iter(()))


def test_this_machine_is_fit(tmp_path: Path) -> None:
    findings = examine(Questions(pool_mib=1))
    assert {one.subject for one in findings} >= {"python", "packages", "open files", "shared memory", "shared mapping"}
    assert not [one for one in findings if one.verdict is Verdict.FAIL]


def test_gpus_are_asked_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert found("GPU").verdict is Verdict.OK


def test_too_little_shared_memory_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(1 << 26, 0, 1 << 26)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    finding = found("shared memory", pool_mib=1024)
    assert (finding.verdict, "64 MiB free" in finding.found, "shm_size" in finding.remedy) == (Verdict.FAIL, True, True)


def test_a_taken_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert found(f"port {port}", ports=(port,)).verdict is Verdict.FAIL
    assert found(f"port {port}", ports=(port,)).verdict is Verdict.OK


@pytest.fixture
def answering() -> Iterator[list[bytes]]:
    """Something that listens and answers what it is told to."""
    answers: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers.append(str(server.getsockname()[1]).encode())

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answers[-1])

        thread = threading.Thread(target=serve)
        thread.start()
        yield answers
        thread.join(5)


@pytest.mark.parametrize(("reply", "verdict"), [(b"+PONG\r\n", Verdict.OK), (b"HTTP/1.1 400\r\n", Verdict.FAIL)])
def test_redis_is_asked(answering: list[bytes], reply: bytes, verdict: Verdict) -> None:
    port = answering[0].decode()
    answering.append(reply)
    assert found("redis", redis=f"redis://127.0.0.1:{port}/0").verdict is verdict


def test_a_redis_that_is_away_or_no_redis_is_said() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert found("redis", redis=f"redis://127.0.0.1:{port}").verdict is Verdict.FAIL
    assert found("redis", redis="rediss://somewhere").verdict is Verdict.WARN


def test_services_are_asked_for_their_health(gateway: ScriptedGateway) -> None:
    assert found("gateway", gateway=gateway.address).verdict is Verdict.OK
    away = found("verifier", verifier="127.0.0.1:1")
    assert (away.verdict, "UNAVAILABLE" in away.found) == (Verdict.FAIL, True)


def test_the_command_fails_when_something_does() -> None:
    ran = RUN.invoke(app, ["doctor", "--pool-mib", "1", "--verifier", "127.0.0.1:1", "--json"])
    assert ran.exit_code == 1
    told = {one["subject"]: one for one in json.loads(ran.stdout)["findings"]}
    assert (told["verifier"]["verdict"], bool(told["verifier"]["remedy"])) == ("fail", True)
    ran = RUN.invoke(app, ["doctor", "--pool-mib", "1"])
    assert (ran.exit_code, "shared memory" in ran.stdout) == (0, True)


def test_health_is_an_exit_code(gateway: ScriptedGateway) -> None:
    ran = RUN.invoke(app, ["health", gateway.address])
    assert (ran.exit_code, ran.stdout.strip()) == (0, "SERVING")
    ran = RUN.invoke(app, ["health", "127.0.0.1:1", "--json"])
    assert (ran.exit_code, json.loads(ran.stdout)["status"]) == (1, "UNAVAILABLE")


def test_a_new_key_is_one_the_gateway_knows(tmp_path: Path) -> None:
    ran = RUN.invoke(app, ["new-key", "acme", "--json"])
    told = json.loads(ran.stdout)
    (tmp_path / "keys").write_text(told["line"] + "\n")
    assert ApiKeys.load(tmp_path / "keys").tenant_of({"x-api-key": told["key"]}) == "acme"
    assert told["key"] not in told["line"]
