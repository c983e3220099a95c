"""Uploads that break off go on where they were; the digest of what was sent goes with them; watching a creation."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from foveate.client import AsyncClient, Client, Progress, Stage
from foveate.client.failures import RESUMES
from foveate.rpc.errors import InvalidArgument, NotFound, Unavailable
from tests.unit.foveate.scripted_gateway import ScriptedGateway

MIB = 1024 * 1024


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.mp4"
    path.write_bytes(random.Random(5).randbytes(5 * MIB + 17))
    return path


def test_a_large_upload_says_its_digest_and_has_a_request_id(gateway: ScriptedGateway, large: Path) -> None:
    with Client(gateway.address) as client:
        client.create_context(large)
        client.create_context(large)
        client.create_context_from_bytes(b"small")
        client.create_context_from_bytes(b"small", request_id="mine")
    first, second, small, named = gateway.contexts.specs
    assert first.upload.sha256 == hashlib.sha256(large.read_bytes()).hexdigest()
    assert first.request_id
    assert first.request_id != second.request_id
    assert (small.request_id, small.upload.sha256, named.request_id) == ("", "", "mine")


def test_an_upload_goes_on_where_it_broke_off(gateway: ScriptedGateway, large: Path) -> None:
    gateway.contexts.break_after_bytes = [2 * MIB, 4 * MIB]
    heard: list[Progress] = []
    with Client(gateway.address) as client:
        context = client.create_context(large, on_progress=heard.append)
    data = large.read_bytes()
    assert context.name == f"contexts/{hashlib.sha256(data).hexdigest()}"
    assert gateway.contexts.num_received_bytes == len(data)  # nothing was sent twice
    assert len({spec.request_id for spec in gateway.contexts.specs}) == 1
    assert Progress(Stage.UPLOAD, len(data), len(data)) in heard


async def test_the_async_client_goes_on_too(gateway: ScriptedGateway, large: Path) -> None:
    gateway.contexts.break_after_bytes = [3 * MIB]
    async with AsyncClient(gateway.address) as client:
        context = await client.create_context(large)
    assert context.name == f"contexts/{gateway.contexts.specs[0].upload.sha256}"
    assert gateway.contexts.num_received_bytes == 5 * MIB + 17


def test_it_gives_up_in_the_end(gateway: ScriptedGateway, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    gateway.contexts.break_after_bytes = [0] * (RESUMES + 1)
    with Client(gateway.address) as client, pytest.raises(Unavailable):
        client.create_context(large)
    assert gateway.contexts.break_after_bytes == []


def test_what_is_no_broken_connection_is_raised_at_once(gateway: ScriptedGateway, tmp_path: Path) -> None:
    gateway.contexts.break_after_bytes = [1]
    with Client(gateway.address) as client, pytest.raises(Unavailable):
        client.create_context_from_bytes(b"small")  # a single chunk: sending it again is the caller's to do
    assert len(gateway.contexts.specs) == 1


def test_watching(gateway: ScriptedGateway) -> None:
    heard: list[Progress] = []
    with Client(gateway.address) as client:
        assert client.watch_context(request_id="r1", on_progress=heard.append).name == "contexts/watched"
        assert client.watch_context(context="contexts/a").name == "contexts/a"
        with pytest.raises(NotFound):
            client.watch_context(request_id="r2")
        for wrong in ({}, {"request_id": "r1", "context": "a"}):
            with pytest.raises(InvalidArgument):
                client.watch_context(**wrong)
    assert heard == [Progress(Stage.DECODE, 1, 4)]


async def test_watching_async(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        assert (await client.watch_context(request_id="r1")).name == "contexts/watched"
        made = await client.create_context_from_bytes(b"small")
        assert (await client.touch_context(made, pinned=True)).pinned
