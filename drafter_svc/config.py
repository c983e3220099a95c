"""The drafter's settings: frozen, built in main.py, passed in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DrafterConfig:
    """Everything a drafter process is started with."""

    model_path: Path
    address: str = "127.0.0.1:0"
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 1
    max_draft_tokens: int = 16
    drain_grace_s: float = 2.0
