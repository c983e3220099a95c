"""Whatever ends, nothing is left: a killed drafter, SIGTERM, Ctrl-C, a killed parent; and a stack without a drafter.

Case S10: killed in the middle of an answer, the drafter takes no token with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from foveate.client import Client, DraftMode, FinishReason, Guarantee
from tests.e2e.support import FPS, long_answer, wait_until

SHM = Path("/dev/shm")


class Command:
    """A `foveate` command in a session and a temporary folder of its own, so that what it leaves can be seen."""

    def __init__(self, process: subprocess.Popen[str], scratch: Path) -> None:
        self.process = process
        self.scratch = scratch
        self._family: dict[int, psutil.Process] = {}

    def family(self) -> dict[int, psutil.Process]:
        """The command's processes that were ever seen, by id."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._family |= {one.pid: one for one in found}
        return self._family

    def services(self) -> list[psutil.Process]:
        """Verifier, drafter and gateway; beside them live the processes that decode videos."""
        mains = ("verifier_svc.main", "drafter_svc.main", "gateway.main")
        return [one for one in self.family().values() if any(main in one.cmdline() for main in mains)]

    def ready(self) -> dict[str, Any]:
        """The line of `foveate up --json`; fails with what the command said when it ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=30)[1]
        told: dict[str, Any] = json.loads(line)
        return told

    def wait_for_complaint(self, text: str) -> str:
        """Returns what the command has said on stderr, once `text` is among it."""
        assert self.process.stderr is not None
        said, descriptor = "", self.process.stderr.fileno()

        def is_said() -> bool:
            nonlocal said
            if select.select([descriptor], [], [], 0)[0]:
                said += os.read(descriptor, 65536).decode()
            return text in said

        assert wait_until(is_said, 30), said
        return said

    def assert_nothing_is_left(self) -> None:
        gone, alive = psutil.wait_procs(list(self._family.values()), timeout=15)
        assert not alive
        assert len(gone) == len(self._family)
        for pid in self._family:
            assert not list(SHM.glob(f"foveate-*-{pid}-*"))
        assert sorted(path.name for path in self.scratch.iterdir()) == []


@contextmanager
def command(scratch: Path, *arguments: Any) -> Iterator[Command]:
    scratch.mkdir()
    environ = {**os.environ, "TMPDIR": str(scratch)}
    environ.pop("FOVEATE_SERVER", None)
    line = [sys.executable, "-m", "foveate.cli.main", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env=environ, start_new_session=True, **pipes) as process:
        started = Command(process, scratch)
        try:
            yield started
        finally:
            for one in started.family().values():
                if one.is_running():
                    one.kill()
            process.kill()


def test_a_drafter_killed_in_mid_answer_changes_nothing_and_sigterm_leaves_nothing(
    model: Path, video: Path, tmp_path: Path
) -> None:
    up = ("up", "--port", 0, "--model", model, "--deterministic", "--pool-mib", 64, "--json")
    with command(tmp_path / "tmp", *up) as running:
        ready = running.ready()
        family = running.family()
        assert len(running.services()) == 3
        assert any(list(SHM.glob(f"foveate-*-{pid}-*")) for pid in family)
        with Client(ready["gateway"], timeout_s=60) as client:
            _kill_drafter_in_mid_answer(client, video, family)
        err = running.wait_for_complaint("the drafter is gone")
        running.process.send_signal(signal.SIGTERM)
        assert "Traceback" not in err + running.process.communicate(timeout=30)[1]
        assert running.process.returncode == 0
        running.assert_nothing_is_left()


def _kill_drafter_in_mid_answer(client: Client, video: Path, family: dict[int, psutil.Process]) -> None:
    context = client.create_context(video, fps=FPS)
    plain, options = long_answer(client, context)

    def is_drafted() -> bool:  # on a machine that does much else a draft may come too late, and the answer goes on
        answer = client.ask(context, plain.question, **options)
        assert answer.token_ids == plain.token_ids
        return (answer.stats.draft_mode, answer.notes) == (DraftMode.SPARSE, ())

    assert wait_until(is_drafted, 60)
    drafter = next(one for one in family.values() if "drafter_svc.main" in one.cmdline())
    with client.stream(context, plain.question, **options) as stream:
        next(stream)
        next(stream)
        drafter.kill()
        answer = stream.result
    assert answer.token_ids == plain.token_ids
    assert answer.text == plain.text
    assert answer.guarantee is Guarantee.LOSSLESS
    assert any("drafter" in note for note in answer.notes)
    assert wait_until(lambda: not client.server_info().drafter_ready, 10)
    after = client.ask(context, plain.question, **options)
    assert (after.token_ids, after.stats.draft_mode) == (plain.token_ids, DraftMode.NGRAM)


def test_ask_brings_a_stack_up_and_down_and_works_without_a_drafter(model: Path, video: Path, tmp_path: Path) -> None:
    ask = ("ask", video, "Describe the video.", "--model", model, "--no-drafter", "--fps", FPS, "--json")
    with command(tmp_path / "tmp", *ask) as running:
        assert wait_until(lambda: len(running.family()) >= 2 or running.process.poll() is not None, 120)
        out, err = running.process.communicate(timeout=120)
        assert (running.process.returncode, err) == (0, "")
        told = json.loads(out)
        assert out.count("\n") == 1
        assert told["text"]
        assert told["finish_reason"] == FinishReason.EOS
        assert told["guarantee"] == Guarantee.LOSSLESS
        assert told["stats"]["draft_mode"] == DraftMode.NGRAM
        assert told["context"]["video"]["num_frames"] == 48
        running.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_mid_answer_leaves_nothing(model: Path, video: Path, tmp_path: Path, number: int) -> None:
    ask = ("ask", video, "Describe the video.", "--model", model, "--no-drafter", "--fps", FPS)
    with command(tmp_path / "tmp", *ask, "--temperature", "10", "--max-tokens", "4000") as running:
        assert running.process.stdout is not None
        assert running.process.stdout.read(1)
        assert len(running.services()) == 2
        os.killpg(running.process.pid, number)
        _, err = running.process.communicate(timeout=30)
        assert running.process.returncode == 128 + number
        assert "Traceback" not in err
        running.assert_nothing_is_left()


def test_ctrl_c_while_starting_leaves_nothing(model: Path, video: Path, tmp_path: Path) -> None:
    with command(tmp_path / "tmp", "ask", video, "q", "--model", model) as running:
        assert wait_until(lambda: len(running.services()) == 2, 60)
        os.killpg(running.process.pid, signal.SIGINT)
        _, err = running.process.communicate(timeout=30)
        assert running.process.returncode == 130
        assert "Traceback" not in err
        running.assert_nothing_is_left()


def test_services_end_with_a_parent_that_is_killed(model: Path, tmp_path: Path) -> None:
    with command(tmp_path / "tmp", "up", "--port", 0, "--model", model, "--no-drafter", "--json") as running:
        assert running.ready()["drafter"] is None
        family = running.family()
        running.process.kill()
        psutil.wait_procs(list(family.values()), timeout=15)
        assert not any(one.is_running() for one in family.values())
        for pid in family:
            assert not list(SHM.glob(f"foveate-*-{pid}-*"))


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with command(tmp_path / "tmp", "up", "--port", port, "--model", model) as running:
            out, err = running.process.communicate(timeout=30)
            assert running.process.returncode == 6
            assert err == f"error: the gateway cannot listen on 127.0.0.1:{port}: Address already in use\n"
            assert out == ""
            running.assert_nothing_is_left()
