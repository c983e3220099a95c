from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.foveate.scripted_gateway import ScriptedGateway


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    with ScriptedGateway() as served:
        yield served


@pytest.fixture
def video(tmp_path: Path) -> Path:
    """A file whose bytes span several chunks; the scripted gateway decodes nothing."""
    path = tmp_path / "clip.mp4"
    path.write_bytes(bytes(range(256)) * 10_000)  # 2.4 MiB
    return path
