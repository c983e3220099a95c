"""A training run that can be stopped and resumed: deadline schedule, atomic checkpoints, a JSONL curve."""

import json
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SAVE_EVERY_S = 120.0


@dataclass
class Clock:
    """Seconds of training over all resumptions of a run."""

    budget_s: float
    before_s: float = 0.0
    started_at: float = 0.0

    def start(self) -> None:
        self.started_at = time.monotonic()

    def elapsed_s(self) -> float:
        return self.before_s + time.monotonic() - self.started_at

    def progress(self) -> float:
        return min(1.0, self.elapsed_s() / self.budget_s)


@dataclass(frozen=True)
class Schedule:
    """How long a run is: by steps, so that another machine makes the same run, or else by the clock."""

    num_steps: int | None = None
    budget_s: float = 3600.0


def cosine(progress: float, *, step: int, warmup_steps: int, floor: float = 0.03) -> float:
    """Learning-rate factor that reaches its floor at the deadline."""
    warm = min(1.0, (step + 1) / warmup_steps)
    return warm * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class Run:
    """Owns a run's folder: `state.pt` (everything needed to resume) and `curve.jsonl`."""

    def __init__(self, folder: Path, *, schedule: Schedule, seed: int) -> None:
        self.num_steps = schedule.num_steps
        self.folder = folder
        self.clock = Clock(schedule.budget_s)
        self.rng = random.Random(seed)
        self.step = 0
        self.num_videos = 0
        self._last_save = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(seed)

    def progress(self) -> float:
        """Share of the schedule that is done."""
        return self.clock.progress() if self.num_steps is None else min(1.0, self.step / self.num_steps)

    def resume(self, parts: dict[str, Any], *, at: float | None = None) -> bool:
        """Load the last state into `parts` (things with load_state_dict), if there is one.

        at: go on at this share of the schedule instead of where the run stopped
        """
        path = self.folder / "state.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self.step = state["step"]
        self.num_videos = state["num_videos"]
        self.clock.before_s = state["elapsed_s"]
        if at is not None:
            self.clock.before_s = at * self.clock.budget_s
            self.step = round(at * self.num_steps) if self.num_steps else self.step
        self.rng.setstate(state["rng"])
        torch.set_rng_state(state["torch_rng"])
        return True

    def start(self) -> None:
        self.clock.start()
        self._last_save = self.clock.elapsed_s()

    def save_due(self) -> bool:
        return self.clock.elapsed_s() - self._last_save > SAVE_EVERY_S

    def save(self, parts: dict[str, Any]) -> None:
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {
            "step": self.step,
            "num_videos": self.num_videos,
            "elapsed_s": self.clock.elapsed_s(),
            "rng": self.rng.getstate(),
            "torch_rng": torch.get_rng_state(),
        }
        partial = self.folder / "state.pt.partial"
        torch.save(state, partial)
        os.replace(partial, self.folder / "state.pt")
        self._last_save = self.clock.elapsed_s()

    def log(self, **values: float) -> None:
        elapsed_s = round(self.clock.elapsed_s(), 1)
        record = {"step": self.step, "elapsed_s": elapsed_s, "num_videos": self.num_videos}
        record |= {name: round(value, 4) for name, value in values.items()}
        with (self.folder / "curve.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
