"""A Node program with @grpc/grpc-js and the .proto files alone: asks, streams, cancels, reads rich errors."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import TEXT
from tests.fakes import CONTEXT

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "node"
PACKAGES = ROOT / "build/node"


@pytest.fixture(scope="module")
def program() -> Path:
    """The program beside its packages, which are installed once."""
    if shutil.which("npm") is None:
        pytest.skip("Node is not installed")
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "ask.js"):
        shutil.copy(FOLDER / name, PACKAGES)
    if not (PACKAGES / "node_modules/@grpc/grpc-js").is_dir():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=PACKAGES, check=True, timeout=240)
    return PACKAGES / "ask.js"


@pytest.fixture(scope="module")
def told(program: Path, gateway: str) -> dict[str, Any]:
    command = ["node", program, ROOT / "protos", gateway, CONTEXT]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_it_asks_what_is_served_and_held(told: dict[str, Any]) -> None:
    assert told["info"]["model"] == "toy"
    assert told["contexts"] == [CONTEXT]


def test_it_streams_an_answer(told: dict[str, Any]) -> None:
    whole = told["whole"]
    assert whole["code"] == 0
    assert (whole["kinds"][0], whole["kinds"][-1]) == ("started", "finished")
    assert whole["kinds"].count("delta") > 2
    assert whole["text"] == TEXT
    assert whole["finished"]["num_output_tokens"] == whole["num_tokens"]
    assert whole["finished"]["guarantee"] == "GUARANTEE_LOSSLESS"
    assert whole["finished"]["stats"]["num_accepted_tokens"] > 0
    assert told["again"]["text"] == whole["text"]


def test_it_cancels(told: dict[str, Any]) -> None:
    assert told["cancelled"]["code"] == 1
    assert "finished" not in told["cancelled"]["kinds"]


def test_it_reads_rich_errors(told: dict[str, Any]) -> None:
    assert (told["wrong"]["code"], told["wrong"]["has_details"], told["wrong"]["violations"]) == (3, True, True)
    assert (told["missing"]["code"], told["missing"]["has_details"]) == (5, True)
