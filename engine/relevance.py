"""How much a place of an answer looks at the video: LVSpec's visual relevance (arXiv 2604.05650), without extra passes.

The hidden state at the place is compared with the hidden states of the video's tokens, kept from prefill: relevance is
the mean of the N largest cosines. Which layer's states, whether those of the place that predicts a token or of the one
that reads it, and whether the mean visual state is taken off first, the paper leaves open; each model has its own
measured settings (`python -m bench.relevance`), kept beside its weights in `foveate.json`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SETTINGS_FILE = "foveate.json"
MAX_NEAREST = 1024
_DEFAULT_NEAREST = 10


@dataclass(frozen=True)
class RelevanceSettings:
    """How a model's relevance is measured.

    `layer` counts as transformers' hidden_states do: 0 is the embedding, the number of layers is after the final norm.
    `quantiles` of relevance over calibration answers are evenly spaced, from the smallest to the largest; may be empty.
    """

    layer: int
    at_predicting: bool = True
    is_centred: bool = False
    num_nearest: int = _DEFAULT_NEAREST
    quantiles: tuple[float, ...] = ()

    @classmethod
    def read(cls, folder: Path, num_layers: int) -> RelevanceSettings:
        """Reads a checkpoint's settings; without any, the last layer at the predicting place.

        Raises ValueError when the file holds settings that cannot be.
        """
        file = folder / SETTINGS_FILE
        values: dict[str, Any] = json.loads(file.read_text()).get("relevance", {}) if file.is_file() else {}
        unknown = values.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(f"{file}: relevance has no setting {', '.join(sorted(unknown))}")
        settings = cls(**{"layer": num_layers, **values, "quantiles": tuple(values.get("quantiles", ()))})
        if not 0 <= settings.layer <= num_layers or not 1 <= settings.num_nearest <= MAX_NEAREST:
            raise ValueError(f"{file}: relevance layer must be 0 to {num_layers}, num_nearest 1 to {MAX_NEAREST}")
        return settings

    def write(self, folder: Path) -> None:
        """Writes the settings into a checkpoint, beside whatever else its file holds."""
        file = folder / SETTINGS_FILE
        values = json.loads(file.read_text()) if file.is_file() else {}
        values["relevance"] = asdict(self)
        file.write_text(json.dumps(values, indent=1) + "\n")

    @property
    def tensor_name(self) -> str:
        """Name of the kept tensor; it says all that its content depends on beside model and video."""
        return f"visual_states/layer{self.layer}/{'centred' if self.is_centred else 'raw'}"

    def visual_table(self, states: Tensor) -> Tensor:
        """Returns what is kept of visual states [num_visual, hidden]: [1 + num_visual, hidden].

        Row 0 is the mean that is taken off states that are compared, zero unless centred; then the visual states less
        that mean, each of length 1.
        """
        full = states.float()
        centre = full.mean(dim=0, keepdim=True) if self.is_centred else torch.zeros_like(full[:1])
        return torch.cat([centre, F.normalize(full - centre, dim=-1)]).to(states.dtype)

    def scores(self, states: Tensor, table: Tensor, num_nearest: int) -> Tensor:
        """Returns the relevance of hidden states [num_rows, hidden] to a visual table: float32 [num_rows]."""
        centre, visual = table[:1].float(), table[1:]
        compared = F.normalize(states.float() - centre, dim=-1).to(visual.dtype)
        cosines = (compared @ visual.T).float()  # [num_rows, num_visual]
        return cosines.topk(min(num_nearest, cosines.shape[1]), dim=-1).values.mean(dim=-1)

    def rows(self, num_drafts: int, num_rows: int) -> slice | Tensor:
        """Which of a verification's `num_rows` rows of hidden states hold those of its `num_drafts` + 1 places.

        A place is predicted one row before it is read; the place after the last draft is not read in this pass, so its
        predicting row stands for it.
        """
        predicting = num_rows - num_drafts - 1
        if self.at_predicting:
            return slice(predicting, num_rows)
        return torch.cat([torch.arange(predicting + 1, num_rows), torch.tensor([num_rows - 1])])


class LayerTap:
    """Keeps one layer's hidden states of a forward: [num_rows, hidden], of the new tokens first."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._states: Tensor | None = None

    def take(self, states: Tensor) -> None:
        """Called by the forward when it has reached the layer."""
        self._states = states

    @property
    def states(self) -> Tensor:
        """The states; only after the forward."""
        assert self._states is not None, "the forward comes first"
        return self._states


def top_entropy(logits: Tensor, num_largest: int = 3) -> Tensor:
    """Returns -sum p ln p over the largest probabilities of logits [num_rows, vocab], in nats: float32 [num_rows]."""
    full = logits.double()
    log_p = full.topk(min(num_largest, full.shape[-1]), dim=-1).values - full.logsumexp(dim=-1, keepdim=True)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(dim=-1).float()  # a probability of zero adds nothing


def log_probabilities(logits: Tensor, token_ids: tuple[int, ...]) -> Tensor:
    """Returns the log-probability of one token per row of logits [num_rows, vocab]: float32 [num_rows]."""
    if not token_ids:
        return logits.new_zeros(0)
    rows = logits[: len(token_ids)].double()
    chosen = rows.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))[:, 0]
    return (chosen - _log_sums(rows)).float()


def top_log_probabilities(logits: Tensor, num_top: int) -> tuple[list[list[int]], list[list[float]]]:
    """Returns ids and log-probabilities of the likeliest tokens of each row of logits [num_rows, vocab].

    The likeliest come first, of equals the lowest id.
    """
    rows = logits.double()
    _, likeliest = rows.topk(min(num_top, rows.shape[-1]), dim=-1)
    token_ids = likeliest.sort(dim=-1).values
    values, order = rows.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    log_probabilities = (values - _log_sums(rows).unsqueeze(1)).float()
    return token_ids.gather(1, order).tolist(), log_probabilities.tolist()


def _log_sums(rows: Tensor) -> Tensor:
    """Returns the log of the sum of exponentials of each row, one at a time: bits must not depend on rows beside it."""
    return torch.stack([row.logsumexp(-1) for row in rows])
