"""The life of a service's process: its flags, and that what was loaded is closed however the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from foveate.rpc.process import FlagParser, positive, run_service, serve_loaded
from foveate.rpc.server import Server


class Model:
    """Takes its time to load, and notes what happens to it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.loaded = asyncio.Event()

    async def load(self) -> Model:
        self.events.append("loading")
        await self.loaded.wait()
        return self

    def serve(self, model: Model) -> None:
        self.events.append("serving")

    async def close(self) -> None:
        self.events.append("closed")


async def until(model: Model, event: str) -> None:
    async with asyncio.timeout(5):
        while event not in model.events:  # noqa: ASYNC110 - the order of events is what is tested
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_a_signal_and_closes(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    model, server = Model(), Server([], address="127.0.0.1:0")
    life = asyncio.create_task(serve_loaded(server, model.load, model.serve, grace_s=0.1))
    await until(model, "loading")
    model.loaded.set()
    await until(model, "serving")
    os.kill(os.getpid(), number)
    await asyncio.wait_for(life, 5)
    assert model.events == ["loading", "serving", "closed"]
    assert capsys.readouterr().out == f"READY {server.port}\n"


async def test_it_is_announced_while_it_serves_and_withdrawn_before_it_drains() -> None:
    model, server = Model(), Server([], address="127.0.0.1:0")
    model.loaded.set()
    stopping = server.stop

    async def stop(grace_s: float) -> None:
        model.events.append("draining")
        await stopping(grace_s)

    @contextlib.asynccontextmanager
    async def announce(loaded: Model) -> AsyncIterator[None]:
        loaded.events.append("announced")
        yield
        loaded.events.append("withdrawn")

    server.stop = stop  # type: ignore[method-assign]
    life = asyncio.create_task(serve_loaded(server, model.load, model.serve, grace_s=0.1, announce=announce))
    await until(model, "announced")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(life, 5)
    assert model.events[:5] == ["loading", "serving", "announced", "withdrawn", "draining"]


async def test_what_a_signal_finds_loading_is_closed_too(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    life = asyncio.create_task(serve_loaded(Server([], address="127.0.0.1:0"), model.load, model.serve, grace_s=0.1))
    await until(model, "loading")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    assert not life.done()
    model.loaded.set()
    await asyncio.wait_for(life, 5)
    assert model.events == ["loading", "closed"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [OSError("cannot listen"), ValueError("two\nlines"), KeyError("asked for")])
def test_what_keeps_it_from_starting_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve() -> None:
        raise error

    assert run_service("drafter", serve, failures=(KeyError,)) == 1
    assert capsys.readouterr().err == f"drafter: {error}\n".replace("two\nlines", "two lines")


def test_a_bug_is_not_taken_for_a_wrong_setting() -> None:
    async def serve() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_service("drafter", serve)


def test_variables_are_defaults_and_flags_win(capsys: pytest.CaptureFixture[str]) -> None:
    def parsed(arguments: list[str], environment: dict[str, str]) -> dict[str, object]:
        parser = FlagParser("service", "A service.", environment)
        parser.flag("num-things", positive, 3, "how many")
        parser.flag("folder", Path, None, "where")
        parser.switch("fast", "be quick")
        return vars(parser.parse_args(arguments))

    assert parsed([], {}) == {"num_things": 3, "folder": None, "fast": False}
    told = {"FOVEATE_NUM_THINGS": "7", "FOVEATE_FOLDER": "/x", "FOVEATE_FAST": "yes"}
    assert parsed([], told) == {"num_things": 7, "folder": Path("/x"), "fast": True}
    assert parsed(["--num-things", "8"], told)["num_things"] == 8
    for arguments, environment in ((["--num-things", "0"], {}), ([], {"FOVEATE_NUM_THINGS": "many"})):
        with pytest.raises(SystemExit):
            parsed(arguments, environment)
        assert "--num-things" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed(["--help"], told)
    assert "how many (default 7); $FOVEATE_NUM_THINGS" in " ".join(capsys.readouterr().out.split())
