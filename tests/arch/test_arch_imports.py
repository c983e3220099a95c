"""Imports go one way, and the torch-free core stays torch-free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "torchvision", "transformers", "numpy", "av", "PIL", "engine", "verifier_svc", "drafter_svc")


def modules_of(package: str) -> list[str]:
    """Returns all modules below a package of this repository."""
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("package", ["gateway", "foveate"])
def test_importing_everything_loads_nothing_heavy(package: str) -> None:
    imports = "; ".join(f"import {module}" for module in modules_of(package) if not module.endswith("__main__"))
    program = f"{imports}; import sys; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter", reason="the contracts need the extra `dev`")
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_protobuf_stops_at_the_edge_of_the_gateway() -> None:
    """Inside are values: messages are seen by the codec, the servicers, the clients and main only."""
    allowed = {"servicer.py", "clients.py", "main.py"}
    offenders = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "gateway").rglob("*.py")
        if path.name not in allowed and path.parent.name != "codec" and "foveate.v1" in _imports(path)
    ]
    assert offenders == []


def test_only_main_reads_the_environment() -> None:
    offenders = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "gateway").rglob("*.py")
        if path.name != "main.py" and ("os.environ" in path.read_text() or "getenv" in path.read_text())
    ]
    assert offenders == []


def test_nothing_is_pickled() -> None:
    packages = ("foveate", "engine", "drafter_svc", "verifier_svc", "gateway")
    offenders = [
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if "pickle" in _imports(path)
    ]
    assert offenders == []


def _imports(path: Path) -> str:
    return "\n".join(line for line in path.read_text().splitlines() if line.startswith(("import ", "from ")))
