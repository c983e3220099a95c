"""Stage A: the vision tower alone learns, for every visual token, what its cell shows.

With a teacher, a trained model of another family, it also learns to give the teacher's embeddings, so that the text
model of the teacher can read them. A tower that sees single frames cannot see motion: it must tell where things are,
and the first layers of the text model learn beside it to tell motion by comparing frames.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl

from bench.world.facts import CELLS, MOTIONS
from bench.world.families import WorldFamily, family_of
from bench.world.model import MODEL_SIZES
from bench.world.scenes import Plan, World, sample_world
from bench.world.splits import TRAIN
from bench.world.train.pixels import (
    LABEL_CLASSES,
    LABEL_NAMES,
    UNLABELLED,
    cell_labels,
    cell_places,
    video_frames,
    without_first_motion,
)
from bench.world.train.run import Run, Schedule, cosine

LEARNING_RATE = 3e-3
PAIRS_PER_VIDEO = 2
PAIRS_PER_STEP = 112
LOG_EVERY = 25
TEACHER_WEIGHT = 4.0
MOTION = LABEL_NAMES.index("motion")


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over the kinds of label; logits [num_cells, sum of classes], labels [num_cells, num_kinds]."""
    losses = [
        F.cross_entropy(part, labels[:, kind], ignore_index=UNLABELLED)
        for kind, part in enumerate(torch.split(logits, LABEL_CLASSES, -1))
        if bool((labels[:, kind] >= 0).any())
    ]
    return torch.stack(losses).sum()


def visible_labels(labels: Tensor, family: WorldFamily) -> Tensor:
    """The labels that the family's vision tower can know."""
    if family.sees_motion:
        return labels
    known = labels.clone()
    known[:, MOTION] = UNLABELLED
    return known


def label_accuracy(logits: Tensor, labels: Tensor) -> dict[str, float]:
    out = {}
    for kind, part in enumerate(torch.split(logits, LABEL_CLASSES, -1)):
        known = labels[:, kind] >= 0
        if bool(known.any()):
            out[LABEL_NAMES[kind]] = float((part.argmax(-1) == labels[:, kind])[known].float().mean())
    return out


def batch_equal_segments() -> None:
    """Let a Qwen tower attend within frame pairs by one batched call: the stock loop makes one call a pair."""
    _batch_attention(modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention, modeling_qwen2_5_vl.apply_rotary_pos_emb_vision)
    _batch_attention(modeling_qwen2_vl.VisionAttention, modeling_qwen2_vl.apply_rotary_pos_emb_vision)


def _batch_attention(attention, rotate) -> None:  # type: ignore[no-untyped-def]
    stock = attention.forward

    def forward(self, hidden_states, cu_seqlens, position_embeddings=None, **kwargs):  # type: ignore[no-untyped-def]
        lengths = cu_seqlens.diff()
        if not bool((lengths == lengths[0]).all()):
            return stock(self, hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        total, length = hidden_states.shape[0], int(lengths[0])
        q, k, v = self.qkv(hidden_states).reshape(total, 3, self.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
        q, k = rotate(q, k, *position_embeddings)
        q, k, v = (x.reshape(total // length, length, self.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scaling)
        return self.proj(out.transpose(1, 2).reshape(total, -1))

    attention.forward = forward


@dataclass(frozen=True)
class Batch:
    worlds: list[World]
    frames: list[NDArray[np.float32]]  # of each world, [num_frames, 48, 48, 3]
    labels: Tensor  # [num_cells, 5]

    def patches(self, family: WorldFamily) -> Tensor:
        return torch.cat([family.patches(frames) for frames in self.frames])


def make_batch(run: Run, family: WorldFamily) -> Batch:
    """Short videos without brief things; longer ones where several frames are needed to see motion."""
    num_pairs = PAIRS_PER_VIDEO if family.sees_motion else 2 * PAIRS_PER_VIDEO
    plan = Plan(num_pairs, max_things=3, max_scenes=1, max_together=3, brief_share=0.0)
    worlds = [
        sample_world(run.rng.randrange(TRAIN.start, TRAIN.stop), plan) for _ in range(PAIRS_PER_STEP // num_pairs)
    ]
    frames = [video_frames(world, run.rng) for world in worlds]
    by_world = [cell_labels(world) for world in worlds]
    if not family.sees_motion:
        by_world = [without_first_motion(world, labels) for world, labels in zip(worlds, by_world, strict=True)]
    return Batch(worlds, frames, torch.from_numpy(np.concatenate(by_world)).view(-1, len(LABEL_NAMES)))


class Teacher:
    """A trained checkpoint whose visual embeddings are to be given by another tower."""

    def __init__(self, checkpoint: Path, device: str) -> None:
        self.family = family_of(checkpoint)
        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self.model = model.to(device).eval().requires_grad_(False)
        self._device = device

    def distance(self, batch: Batch, features: Tensor) -> Tensor:
        """Mean squared error of features [num_cells, hidden], as a share of the teacher's variance."""
        num_rows = len(batch.frames)
        with torch.no_grad():
            patches = batch.patches(self.family).to(self._device)
            wanted = self.family.cell_features(self.family.encode(self.model, patches, num_rows), num_rows)
        return F.mse_loss(features, wanted) / wanted.var()


class FrameComparer(nn.Module):
    """Heads that ask where things are in a frame, and what moves, of the text model's first layers."""

    def __init__(self, family: WorldFamily, model: Any) -> None:
        super().__init__()
        self._family = family
        hidden_size = model.config.text_config.hidden_size
        self.text = model.model.language_model
        self.num_layers = num_comparing_layers(self.text)
        self.place_head = nn.Linear(hidden_size, 4)
        self.motion_head = nn.Linear(hidden_size, len(MOTIONS))
        self._compared = Output(self.text.layers[self.num_layers - 1])

    def losses(self, batch: Batch, features: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Of places and of motions; features [num_visual_tokens, hidden] with those that show cells among them."""
        num_rows = len(batch.frames)
        true = torch.cat([torch.from_numpy(cell_places(world)) for world in batch.worlds]).view(-1, 4).to(cells.device)
        known = ~true.isnan().any(-1)
        of_places = F.mse_loss(self.place_head(cells)[known], true[known])
        compared = self._family.cell_features(self._compare(features.view(num_rows, -1, features.shape[-1])), num_rows)
        motions = batch.labels[:, MOTION].to(cells.device)
        return of_places, F.cross_entropy(self.motion_head(compared), motions, ignore_index=UNLABELLED)

    def _compare(self, embeds: Tensor) -> Tensor:
        """The first layers alone: [num_rows * num_visual_tokens, hidden] of [num_rows, num_visual_tokens, hidden]."""
        positions = self._family.video_positions(0, embeds.shape[1] // CELLS, 1.0)[:, None].to(embeds.device)
        whole, self.text.config.num_hidden_layers = self.text.config.num_hidden_layers, self.num_layers
        try:
            self.text(inputs_embeds=embeds, position_ids=self._family.position_ids(positions), use_cache=False)
        finally:
            self.text.config.num_hidden_layers = whole
        return self._compared.value.flatten(0, 1)


def num_comparing_layers(text: Any) -> int:
    """Text layers that may compare frames before a thing's motion must be known: two, but never the last one."""
    return min(2, int(text.config.num_hidden_layers) - 1)


class Output:
    """The last output of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.value = torch.empty(0)
        module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, arguments: object, output: Tensor) -> None:
        self.value = output


class TowerLearner:
    """The tower, its throw-away heads and their optimizer."""

    def __init__(self, family: WorldFamily, *, config: str, teacher: Path | None, device: str) -> None:
        size = MODEL_SIZES[config]
        self.family, self._device = family, device
        self._model = family.build_model(size).to(device)
        self._head = nn.Linear(size.hidden_size, sum(LABEL_CLASSES)).to(device)
        self._teacher = Teacher(teacher, device) if teacher else None
        visual = family.vision_parts(self._model)
        self.parts: dict[str, Any] = {"visual": visual, "head": self._head}
        self._comparer: FrameComparer | None = None
        if not family.sees_motion:
            if self._teacher is not None:
                self._model.model.language_model.load_state_dict(self._teacher.model.model.language_model.state_dict())
            self._comparer = FrameComparer(family, self._model).to(device)
            self.parts["comparer"] = self._comparer
        self._params = [param for part in self.parts.values() for param in part.parameters()]
        self._optimizer = torch.optim.AdamW(
            self._params, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.02, fused=True
        )
        self.parts["optimizer"] = self._optimizer

    def learn(self, batch: Batch, factor: float) -> dict[str, float]:
        """One step; returns losses and accuracies."""
        num_rows = len(batch.frames)
        labels = visible_labels(batch.labels.to(self._device), self.family)
        features = self.family.encode(self._model, batch.patches(self.family).to(self._device), num_rows)
        cells = self.family.cell_features(features, num_rows)
        logits = self._head(cells)
        losses = {"labels": label_loss(logits, labels)}
        if self._teacher is not None:
            losses["distance"] = TEACHER_WEIGHT * self._teacher.distance(batch, cells)
        if self._comparer is not None:
            losses["places"], losses["motions"] = self._comparer.losses(batch, features, cells)
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        self._optimizer.zero_grad()
        torch.autograd.backward(torch.stack(list(losses.values())).sum())
        torch.nn.utils.clip_grad_norm_([param for param in self._params if param.grad is not None], 1.0)
        self._optimizer.step()
        values = {name: float(value.detach()) for name, value in losses.items()}
        return {**values, **label_accuracy(logits.detach(), labels)}


def train_vision(
    out: Path,
    family: WorldFamily,
    *,
    config: str,
    teacher: Path | None,
    schedule: Schedule,
    seed: int,
    device: str,
) -> None:
    batch_equal_segments()
    run = Run(out, schedule=schedule, seed=seed)
    learner = TowerLearner(family, config=config, teacher=teacher, device=device)
    run.resume(learner.parts)
    run.start()
    while run.progress() < 1:
        batch = make_batch(run, family)
        values = learner.learn(batch, cosine(run.progress(), step=run.step, warmup_steps=40))
        run.step += 1
        run.num_videos += len(batch.worlds)
        if run.step % LOG_EVERY == 0:
            run.log(**values)
        if run.save_due():
            run.save(learner.parts)
    run.save(learner.parts)
