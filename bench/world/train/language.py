"""Stage B: the whole model learns to answer, from the vision stage's tower."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from bench.world.facts import COLORS
from bench.world.model import MODEL_SIZES, TOKEN_ID, VOCAB_SIZE, build_model
from bench.world.processor import build_processor
from bench.world.train.branches import IGNORED, BranchPacker, Rows, conversations, fact_token_ids
from bench.world.train.curriculum import lesson, samples
from bench.world.train.pixels import LABEL_CLASSES, cell_labels, video_patches
from bench.world.train.run import Run, cosine
from bench.world.train.vision import batch_equal_segments, label_loss

LEARNING_RATE = 2e-3
VISION_LEARNING_RATE_SHARE = 0.5
WEIGHT_DECAY = 0.05
FACT_WEIGHT = 3.0
LABEL_LOSS_WEIGHT = 0.1
HIDE_EMPTY_SHARE = 0.2  # of rows, whose text cannot look at cells without things: facts bind to cells that show them
CHECKPOINT_EVERY_S = 600.0
LOG_EVERY = 25
AVERAGED_STEPS = 50


@dataclass(frozen=True)
class Batch:
    patches: Tensor
    grid: Tensor  # [num_rows, 3]
    rows: Rows
    labels: Tensor  # [num_cells, 5]


class Learner:
    """The model with its throw-away label head, and their optimizer."""

    def __init__(self, config: str, vision: Path | None, device: str) -> None:
        self.device = device
        self.model = build_model(MODEL_SIZES[config]).to(device)
        self.head = nn.Linear(MODEL_SIZES[config].hidden_size, sum(LABEL_CLASSES)).to(device)
        if vision is not None:
            state = torch.load(vision / "state.pt", map_location=device, weights_only=False)
            self.model.model.visual.load_state_dict(state["visual"])
            self.head.load_state_dict(state["head"])
        self.optimizer = torch.optim.AdamW(self._groups(), lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
        self.parts = {"model": self.model, "head": self.head, "optimizer": self.optimizer}

    def _groups(self) -> list[dict[str, object]]:
        seeing = [*self.model.model.visual.parameters(), *self.head.parameters()]
        known = {id(param) for param in seeing}
        others = [param for param in self.model.parameters() if id(param) not in known]
        return [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": WEIGHT_DECAY, "share": 1.0},
            {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0, "share": 1.0},
            {"params": seeing, "weight_decay": 0.02, "share": VISION_LEARNING_RATE_SHARE},
        ]

    def compile(self) -> None:
        for layer in self.model.model.language_model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        for block in self.model.model.visual.blocks:
            block.mlp.forward = torch.compile(block.mlp.forward, dynamic=True)

    def set_rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor * group["share"]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Answer tokens' targets [num_targets], their losses [num_targets], and the loss of the labels."""
        rows, core = batch.rows, self.model.model
        visual = core.visual(batch.patches, grid_thw=batch.grid).pooler_output
        embedded = core.language_model.embed_tokens(rows.input_ids)
        is_video = (rows.input_ids == TOKEN_ID["<|video_pad|>"])[..., None]
        hidden = core.language_model(
            inputs_embeds=embedded.masked_scatter(is_video, visual),
            attention_mask=rows.mask,
            position_ids=rows.positions,
            use_cache=False,
        ).last_hidden_state
        answered = rows.targets != IGNORED
        targets = rows.targets[answered]
        losses = F.cross_entropy(self.model.lm_head(hidden[answered]), targets, reduction="none")
        return targets, losses, label_loss(self.head(visual), batch.labels)

    def learn(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_([*self.model.parameters(), *self.head.parameters()], 1.0)
        self.optimizer.step()


def make_batch(run: Run, packer: BranchPacker, device: str) -> Batch:
    now = lesson(run.rng, run.clock.progress())
    branches = [
        [packer.branch(turns) for turns in conversations(run.rng, samples(run.rng, world))] for world in now.worlds
    ]
    rows = packer.rows(branches, num_pairs=now.num_pairs, interval=now.interval)
    labels = torch.from_numpy(np.stack([cell_labels(world) for world in now.worlds]))  # [num_rows, num_pairs, 9, 5]
    for row in range(len(now.worlds)):
        if run.rng.random() < HIDE_EMPTY_SHARE:
            packer.hide(rows, row, (labels[row, :, :, 0] == len(COLORS)).flatten())
    rows = Rows(*(x.to(device) for x in (rows.input_ids, rows.positions, rows.mask, rows.targets)))
    patches = torch.cat([video_patches(world, run.rng) for world in now.worlds]).to(device)
    grid = torch.tensor([[now.num_pairs, 6, 6]] * len(now.worlds), device=device)
    return Batch(patches, grid, rows, labels.flatten(0, 2).to(device))


class Averages:
    """Running means of the losses, for the curve."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, value) * (1 - 1 / AVERAGED_STEPS) + value / AVERAGED_STEPS


def save_checkpoint(model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, folder: Path) -> None:
    """A bf16 copy that the Auto classes load; the model in training is left as it is."""
    state = {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    processor.save_pretrained(folder)


def token_weights(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Weight of each target token in the loss: [VOCAB_SIZE]."""
    weights = torch.ones(VOCAB_SIZE)
    weights[fact_token_ids(tokenizer)] = FACT_WEIGHT
    return weights


def export(run_folder: Path, *, config: str, checkpoint: Path) -> None:
    """The model of a run as it stands at its last save."""
    model = build_model(MODEL_SIZES[config])
    state = torch.load(run_folder / "state.pt", map_location="cpu", weights_only=False)
    model.load_state_dict(state["model"])
    save_checkpoint(model, build_processor(), checkpoint)


def warm_up(learner: Learner, run: Run, packer: BranchPacker) -> None:
    """Compile outside of the time budget, on two batches of different lengths."""
    rng_state = run.rng.getstate()
    for _ in range(2):
        _, losses, _ = learner.forward(make_batch(run, packer, learner.device))
        torch.autograd.backward(losses.sum())
    learner.optimizer.zero_grad(set_to_none=True)
    run.rng.setstate(rng_state)


def train_language(
    out: Path,
    *,
    config: str,
    vision: Path | None,
    checkpoint: Path | None,
    budget_s: float,
    seed: int,
    device: str,
    resume_at_s: float | None = None,
) -> None:
    batch_equal_segments()
    run = Run(out, budget_s=budget_s, seed=seed)
    learner = Learner(config, vision, device)
    processor = build_processor()
    packer = BranchPacker(processor.tokenizer)
    weights = token_weights(processor.tokenizer).to(device)
    run.resume(learner.parts, at_s=resume_at_s)
    learner.compile()
    run.start()
    warm_up(learner, run, packer)
    run.start()
    _train(
        learner, run, packer, weights, lambda: save_checkpoint(learner.model, processor, checkpoint or out / "model")
    )


def _train(learner: Learner, run: Run, packer: BranchPacker, by_token: Tensor, save: Callable[[], None]) -> None:
    averages, saved_at = Averages(), run.clock.elapsed_s()
    while run.clock.progress() < 1:
        learner.set_rate(cosine(run.clock.progress(), step=run.step, warmup_steps=60))
        batch = make_batch(run, packer, learner.device)
        targets, losses, of_labels = learner.forward(batch)
        weights = by_token[targets]
        fact = weights > 1
        learner.learn((losses * weights).sum() / weights.sum() + LABEL_LOSS_WEIGHT * of_labels)
        run.step += 1
        run.num_videos += len(batch.grid)
        losses = losses.detach()
        averages.add(
            fact=float(losses[fact].mean()),
            filler=float(losses[~fact].mean()),
            labels=float(of_labels.detach()),
        )
        if run.step % LOG_EVERY == 0:
            run.log(**averages.values, num_pairs=float(batch.grid[0, 0]))
        if run.save_due():
            run.save(learner.parts)
        if run.clock.elapsed_s() - saved_at > CHECKPOINT_EVERY_S:
            save()
            saved_at = run.clock.elapsed_s()
    run.save(learner.parts)
    save()
