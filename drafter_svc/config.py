"""The drafter's settings: frozen, built in main.py, passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.placement import DeviceMap
from foveate.registration import RegistrationConfig
from foveate.rpc.serving import ServingConfig


@dataclass(frozen=True)
class DrafterConfig:
    """Everything a drafter process is started with.

    `model_path` is the verifier's checkpoint, for the kinds that share its KV; `small_model_path` a smaller one of the
    family. At least one is set. `layerskip_layers` None is half of the layers.
    """

    model_path: Path | None
    address: str = "127.0.0.1:0"
    device: str = "cpu"
    dtype: str = "float32"
    # Spreads the verifier's model over devices, as VerifierConfig's.
    device_map: DeviceMap | None = None
    num_threads: int = 1
    # Folder of the compiled CPU kernel; None runs steps on PyTorch's kernels.
    kernel_cache: Path | None = None
    max_draft_tokens: int = 16
    # Sequences that may be open at once; answers beyond go on without this drafter.
    max_sequences: int = 256
    # Rows of one step over all chains that are ready.
    max_step_rows: int = 48
    small_model_path: Path | None = None
    layerskip_layers: int | None = None
    drain_grace_s: float = 2.0
    serving: ServingConfig = field(default_factory=ServingConfig)
    registration: RegistrationConfig | None = None
