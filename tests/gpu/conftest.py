"""Real GPU checks; skipped, with the reason, where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.loading import LoadedModel, load_model
from tests.unit.engine.tiny_model import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def on_gpu(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint, device="cuda")


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
