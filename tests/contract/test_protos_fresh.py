"""The committed stubs are those that the contract generates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_regenerating_the_stubs_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="generating stubs needs the extra `dev`")
    environment = {**os.environ, "PYTHON": sys.executable}
    script = ROOT / "scripts" / "generate_protos.sh"
    subprocess.run(["bash", str(script), str(tmp_path)], env=environment, check=True, timeout=120)
    generated = {path.name: path.read_text() for path in (tmp_path / "foveate/v1").iterdir() if path.is_file()}
    committed = {path.name: path.read_text() for path in (ROOT / "foveate/v1").iterdir() if path.is_file()}
    assert sorted(generated) == sorted(committed)
    stale = [name for name in committed if generated[name] != committed[name]]
    assert not stale, f"run `make protos`: {stale}"


def test_every_service_of_the_contract_has_stubs() -> None:
    protos = {path.stem for path in (ROOT / "protos/foveate/v1").glob("*.proto")}
    stubs = {path.stem.removesuffix("_pb2") for path in (ROOT / "foveate/v1").glob("*_pb2.py")}
    assert protos == stubs
