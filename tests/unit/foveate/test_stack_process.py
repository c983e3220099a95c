"""A service process: READY, death while starting, stopping, killing, and the end of its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foveate.checkpoints import DEFAULT_CHECKPOINT, default_checkpoint
from foveate.rpc.errors import FailedPrecondition, NotFound
from foveate.service_process import SHM_DIR, ServiceProcess, StackError
from foveate.stack import Stack, StackConfig, check_address, check_engine, check_model

GOOD = """
import os, signal, sys, tempfile, time
open(tempfile.gettempdir() + "/scratch", "w").close()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("some words", flush=True)
print("READY 4242", flush=True)
time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("READY 1", flush=True)
time.sleep(60)
"""
FAILING = "import sys\nsys.exit('verifier: no such model: /nowhere')"
SILENT = "import time\ntime.sleep(60)"


@pytest.fixture
def spawn(tmp_path: Path) -> Callable[[str], ServiceProcess]:
    def start(code: str) -> ServiceProcess:
        module = f"service_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{module}.py").write_text(code)
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return ServiceProcess("verifier", module, ["--flag"], directory=tmp_path, environ=environ)

    return start


def soon() -> float:
    return time.monotonic() + 10


def test_ready_port_and_clean_stop(spawn: Callable[[str], ServiceProcess], tmp_path: Path) -> None:
    process = spawn(GOOD)
    assert process.wait_ready(soon()) == 4242
    assert (tmp_path / "verifier.tmp" / "scratch").exists()
    process.check()
    process.stop(5)
    assert not process.is_alive
    process.stop(5)


def test_a_stubborn_service_is_killed_and_its_segment_removed(spawn: Callable[[str], ServiceProcess]) -> None:
    process = spawn(STUBBORN)
    process.wait_ready(soon())
    left = SHM_DIR / f"foveate-test-{process.pid}-0123"
    others = SHM_DIR / f"foveate-test-{process.pid}0-0123"
    for path in (left, others):
        path.touch()
    try:
        process.stop(0.2)
        assert not process.is_alive
        assert not left.exists()
        assert others.exists()
    finally:
        others.unlink()
        left.unlink(missing_ok=True)


def test_a_failing_service_is_told_with_its_last_words(spawn: Callable[[str], ServiceProcess]) -> None:
    process = spawn(FAILING)
    with pytest.raises(StackError, match="verifier exited with code 1: verifier: no such model: /nowhere"):
        process.wait_ready(soon())
    process.stop(1)


def test_a_killed_service_is_told(spawn: Callable[[str], ServiceProcess]) -> None:
    process = spawn(GOOD)
    process.wait_ready(soon())
    os.kill(process.pid, signal.SIGKILL)
    process.stop(1)
    with pytest.raises(StackError, match="killed by signal 9"):
        process.check()


def test_a_silent_service_runs_into_the_timeout(spawn: Callable[[str], ServiceProcess]) -> None:
    process = spawn(SILENT)
    with pytest.raises(StackError, match="not ready in time"):
        process.wait_ready(time.monotonic() + 0.2)
    process.stop(1)


PARENT = """
import os, sys, time
from pathlib import Path
from foveate.service_process import ServiceProcess
folder = Path(sys.argv[1])
environ = {**os.environ, "PYTHONPATH": str(folder)}
process = ServiceProcess("verifier", "good_service", [], directory=folder, environ=environ)
process.wait_ready(time.monotonic() + 10)
print(process.pid, flush=True)
time.sleep(60)
"""


def test_a_service_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "good_service.py").write_text(GOOD)
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline_s = soon()
    while _runs(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_missing_engine_and_missing_model_are_clear(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no checkpoint at"):
        check_model(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'foveate\[engine\]'"):
        check_engine()


def test_a_stack_that_was_not_started_has_no_addresses(tmp_path: Path) -> None:
    stack = Stack(StackConfig(model=tmp_path))
    with pytest.raises(StackError, match="not running"):
        _ = stack.addresses
    stack.stop()


def test_the_default_checkpoint_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("foveate.checkpoints._PACKAGE", tmp_path / "foveate")
    with pytest.raises(NotFound, match="--model"):
        default_checkpoint()
    place = tmp_path / "checkpoints" / DEFAULT_CHECKPOINT
    place.mkdir(parents=True)
    (place / "config.json").touch()
    assert default_checkpoint() == place


def test_an_address_that_cannot_be_listened_on_is_refused_early() -> None:
    check_address("127.0.0.1:0")
    check_address("[::1]:0")
    for address in ("nowhere", "127.0.0.1:70000x", "192.0.2.1:80"):
        with pytest.raises(StackError, match="cannot listen on"):
            check_address(address)
