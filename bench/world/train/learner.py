"""What learns in the language stage: the whole model, and throw-away heads that keep its vision labelled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, DynamicCache

from bench.world.facts import COLORS, MOTIONS, WORDS_BY_FACT
from bench.world.families import WorldFamily, family_of
from bench.world.model import MODEL_SIZES, TOKEN_ID
from bench.world.tokenizer import build_tokenizer
from bench.world.train.branches import IGNORED, Rows
from bench.world.train.pixels import LABEL_CLASSES, LABEL_NAMES, UNLABELLED
from bench.world.train.vision import MOTION, Output, label_loss, num_comparing_layers, visible_labels

LEARNING_RATE = 2e-3
VISION_LEARNING_RATE_SHARE = 0.5
WEIGHT_DECAY = 0.05
NUM_WORDED_CELLS = 256


@dataclass(frozen=True)
class Batch:
    patches: Tensor
    num_pairs: int
    rows: Rows
    labels: Tensor  # [num_cells, 5]
    is_long: bool  # only the text is trained, over keys and values of the video taken as given

    @property
    def num_rows(self) -> int:
        return len(self.rows.input_ids)


class Learner:
    """The model with its throw-away label heads, and their optimizer."""

    def __init__(
        self,
        family: WorldFamily,
        *,
        config: str,
        init: Path | None,
        vision: Path | None,
        device: str,
        learning_rate: float = LEARNING_RATE,
    ) -> None:
        """init: a checkpoint to start from, whole if of the same family, else its text model; vision: a vision run."""
        size = MODEL_SIZES[config]
        self.family, self.device, self.learning_rate = family, device, learning_rate
        self.model = family.build_model(size).to(device)
        self.head = nn.Linear(size.hidden_size, sum(LABEL_CLASSES)).to(device)
        self._words = [tensor.to(device) for tensor in _label_words()]
        if init is not None:
            self._start_from(init)
        self.parts: dict[str, Any] = {"model": self.model, "head": self.head}
        self.motion_head: nn.Linear | None = None
        text = self.model.model.language_model
        if not family.sees_motion:
            self.motion_head = nn.Linear(size.hidden_size, len(MOTIONS)).to(device)
            self.parts["motion_head"] = self.motion_head
            self._compared = Output(text.layers[num_comparing_layers(text) - 1])
        if vision is not None:
            self._see_by(vision)
        self.optimizer = torch.optim.AdamW(self._groups(), lr=learning_rate, betas=(0.9, 0.98), fused=True)
        self.parts["optimizer"] = self.optimizer
        self._eager: list[tuple[nn.Module, Callable[..., Any]]] = []

    def _see_by(self, vision: Path) -> None:
        state = torch.load(vision / "state.pt", map_location=self.device, weights_only=True)
        self.family.vision_parts(self.model).load_state_dict(state["visual"])
        self.head.load_state_dict(state["head"])
        if self.motion_head is not None:
            comparer = state["comparer"]
            self.motion_head.load_state_dict(_below("motion_head.", comparer))
            self.model.model.language_model.load_state_dict(_below("text.", comparer))

    def _start_from(self, checkpoint: Path) -> None:
        """Checkpoints are bf16; training goes on in float32."""
        other = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        if family_of(checkpoint).name == self.family.name:
            self.model.load_state_dict(other.state_dict())
        else:
            self.model.model.language_model.load_state_dict(other.model.language_model.state_dict())
            self.model.tie_weights()

    def _groups(self) -> list[dict[str, object]]:
        seeing = [*self.family.vision_parts(self.model).parameters(), *self.head.parameters()]
        known = {id(param) for param in seeing}
        others = [param for param in self.model.parameters() if id(param) not in known]
        if self.motion_head is not None:
            others += self.motion_head.parameters()
        return [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": WEIGHT_DECAY, "share": 1.0},
            {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0, "share": 1.0},
            {"params": seeing, "weight_decay": 0.02, "share": VISION_LEARNING_RATE_SHARE},
        ]

    def compile(self) -> None:
        for layer in self.model.model.language_model.layers:
            self._eager.append((layer, layer.forward))
            layer.forward = torch.compile(layer.forward, dynamic=True)
        for name, module in self.family.vision_parts(self.model).named_modules():
            if name.endswith(".mlp") and not isinstance(module, nn.Sequential):
                module.forward = torch.compile(module.forward, dynamic=True)  # type: ignore[method-assign]

    def set_rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * factor * group["share"]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Answer tokens' targets [num_targets] and losses [num_targets], and the losses of labels and of words."""
        if batch.is_long:
            with self.not_compiled():
                return self._forward_long(batch)
        rows, core = batch.rows, self.model.model
        visual = self.family.encode(self.model, batch.patches, batch.num_rows)
        hidden = core.language_model(
            inputs_embeds=self._embed(rows.input_ids, visual),
            attention_mask=rows.mask,
            position_ids=self.family.position_ids(rows.positions),
            use_cache=False,
        ).last_hidden_state
        return *self._losses(hidden, rows.targets), self._label_loss(batch, visual), self._word_loss(batch, hidden)

    def forward_text(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Losses of text alone [num_targets], for ids and targets [num_sequences, L]."""
        text = self.model.model.language_model
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(3, *input_ids.shape)
        hidden = text(
            inputs_embeds=text.embed_tokens(input_ids),
            position_ids=self.family.position_ids(positions),
            use_cache=False,
        ).last_hidden_state
        return self._losses(hidden, targets.to(input_ids.device))[1]

    def _label_loss(self, batch: Batch, visual: Tensor) -> Tensor:
        cells = self.family.cell_features(visual, batch.num_rows)
        loss = label_loss(self.head(cells), visible_labels(batch.labels, self.family))
        if self.motion_head is None:
            return loss
        at_video = batch.rows.input_ids == TOKEN_ID["<|video_pad|>"]
        compared = self.family.cell_features(self._compared.value[at_video], batch.num_rows)
        motions = batch.labels[:, MOTION]
        if not bool((motions >= 0).any()):
            return loss
        return loss + F.cross_entropy(self.motion_head(compared), motions, ignore_index=UNLABELLED)

    def _word_loss(self, batch: Batch, hidden: Tensor) -> Tensor:
        """How far the last states of cells with things are from saying the words of what they show, all alike.

        Nothing else trains these states, and relevance compares them with those that say words.
        """
        labels = batch.labels
        shows = ((labels >= 0).all(dim=1) & (labels[:, 0] < len(COLORS))).nonzero()[:, 0]
        if not len(shows):
            return hidden.new_zeros(())
        chosen = shows[torch.randperm(len(shows), device=shows.device)[:NUM_WORDED_CELLS]]
        at_video = batch.rows.input_ids == TOKEN_ID["<|video_pad|>"]
        cells = self.family.cell_features(hidden[at_video], batch.num_rows)[chosen]
        said = torch.stack([of_kind[labels[chosen, kind]] for kind, of_kind in enumerate(self._words)], dim=1)
        return -self.model.lm_head(cells).log_softmax(-1).gather(1, said).mean()

    def _forward_long(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One row: the video's prefix without gradients; then the text over its keys and values."""
        rows, core = batch.rows, self.model.model
        positions = self.family.position_ids(rows.positions)
        num_prefix = int((rows.input_ids[0] == TOKEN_ID["<|video_pad|>"]).nonzero()[-1]) + 1
        cache = DynamicCache()
        with torch.no_grad():
            visual = self.family.encode(self.model, batch.patches, batch.num_rows)
            embedded = self._embed(rows.input_ids[:, :num_prefix], visual)
            core.language_model(
                inputs_embeds=embedded, position_ids=positions[..., :num_prefix], cache=cache, use_cache=True
            )
        hidden = core.language_model(
            inputs_embeds=core.language_model.embed_tokens(rows.input_ids[:, num_prefix:]),
            attention_mask=rows.mask[:, :, num_prefix:],
            position_ids=positions[..., num_prefix:],
            cache=cache,
            use_cache=True,
        ).last_hidden_state
        none = hidden.new_zeros(())
        return *self._losses(hidden, rows.targets[:, num_prefix:]), none, none

    def _embed(self, token_ids: Tensor, visual: Tensor) -> Tensor:
        embedded: Tensor = self.model.model.language_model.embed_tokens(token_ids)
        return embedded.masked_scatter((token_ids == TOKEN_ID["<|video_pad|>"])[..., None], visual)

    def _losses(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        answered = targets != IGNORED
        wanted = targets[answered]
        return wanted, F.cross_entropy(self.model.lm_head(hidden[answered]), wanted, reduction="none")

    @contextmanager
    def not_compiled(self) -> Iterator[None]:
        """Long rows are few and each of its own shape: compiling for them does not pay."""
        compiled = [layer.forward for layer, _ in self._eager]
        for layer, forward in self._eager:
            layer.forward = forward
        try:
            yield
        finally:
            for (layer, _), forward in zip(self._eager, compiled, strict=True):
                layer.forward = forward

    def learn(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        self.optimizer.step()


def _label_words() -> list[Tensor]:
    """Of each kind of label the token of each class's word: [num_classes]."""
    tokenizer = build_tokenizer()
    return [
        torch.tensor([tokenizer(f" {word}")["input_ids"][0] for word in WORDS_BY_FACT[kind]]) for kind in LABEL_NAMES
    ]


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
