"""Dockerfiles, compose files and the entry script, checked by their own linters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_a_dockerfile_is_clean(name: str) -> None:
    command = [BIN / "hadolint", "--format", "json", DEPLOY / f"docker/{name}.Dockerfile"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(ran.stdout) == [], ran.stderr


def test_the_gateways_image_has_no_engine_in_it() -> None:
    text = (DEPLOY / "docker/gateway.Dockerfile").read_text()
    assert "'.[telemetry]'" in text
    assert "[engine" not in text


@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_what_an_image_copies_is_there_and_sent(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    text = (DEPLOY / f"docker/{name}.Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert len(sources) > 7
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored


def test_the_entry_script_is_sound(tmp_path: Path) -> None:
    script = DEPLOY / "docker/engine.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    wrong = subprocess.run(["bash", script, "nothing"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "not nothing" in wrong.stderr) == (2, True)


def test_the_entry_script_ends_both_when_one_ends(tmp_path: Path) -> None:
    """With stand-ins for python: one process ends with 3, the other must be ended, and 3 is told."""
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/bash\ncase "$*" in *drafter_svc*) sleep 0.3; exit 3;; esac\n'
        f'trap "echo ended > {tmp_path}/ended; exit 0" TERM\nwhile :; do sleep 0.1; done\n'
    )
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(["bash", DEPLOY / "docker/engine.sh", "both"], env=environment, timeout=20, check=False)
    assert ran.returncode == 3
    assert (tmp_path / "ended").read_text() == "ended\n"


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")])
def test_compose_files_are_sound(files: tuple[str, ...]) -> None:
    for file in files:
        command = [BIN / "compose-lint", "--fail-on", "high", "--format", "json", DEPLOY / file]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_compose_names_only_files_that_are_there() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        build = service.get("build")
        assert build is None or (ROOT / build["dockerfile"]).is_file()
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
    assert compose["services"]["drafter"]["ipc"] == "service:verifier"


def test_compose_ports_are_on_the_loopback() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert len(ports) > 3
    assert all(port.startswith("127.0.0.1:") for port in ports)
