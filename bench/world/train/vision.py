"""Stage A: the vision tower alone learns, for every visual token, what its cell shows."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from bench.world.model import MODEL_SIZES, build_model
from bench.world.scenes import Plan, sample_world
from bench.world.splits import TRAIN
from bench.world.train.pixels import LABEL_CLASSES, LABEL_NAMES, UNLABELLED, cell_labels, video_patches
from bench.world.train.run import Run, cosine

LEARNING_RATE = 3e-3
PAIRS_PER_VIDEO = 2
VIDEOS_PER_STEP = 56
LOG_EVERY = 25


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over the kinds of label; logits [num_cells, sum of classes], labels [num_cells, num_kinds]."""
    losses = [
        F.cross_entropy(part, labels[:, kind], ignore_index=UNLABELLED)
        for kind, part in enumerate(torch.split(logits, LABEL_CLASSES, -1))
        if bool((labels[:, kind] >= 0).any())
    ]
    return torch.stack(losses).sum()


def label_accuracy(logits: Tensor, labels: Tensor) -> dict[str, float]:
    out = {}
    for kind, part in enumerate(torch.split(logits, LABEL_CLASSES, -1)):
        known = labels[:, kind] >= 0
        out[LABEL_NAMES[kind]] = float((part.argmax(-1) == labels[:, kind])[known].float().mean())
    return out


def batch_equal_segments() -> None:
    """Let the vision tower attend within frame pairs by one batched call: the stock loop makes one call a pair."""
    stock = qwen.Qwen2_5_VLVisionAttention.forward

    def forward(self, hidden_states, cu_seqlens, position_embeddings=None, **kwargs):  # type: ignore[no-untyped-def]
        lengths = cu_seqlens.diff()
        if not bool((lengths == lengths[0]).all()):
            return stock(self, hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        total, length = hidden_states.shape[0], int(lengths[0])
        q, k, v = self.qkv(hidden_states).reshape(total, 3, self.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
        q, k = qwen.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        q, k, v = (x.reshape(total // length, length, self.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scaling)
        return self.proj(out.transpose(1, 2).reshape(total, -1))

    qwen.Qwen2_5_VLVisionAttention.forward = forward


def make_batch(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Patches, grid and labels [num_cells, 5] of short videos without brief things."""
    plan = Plan(PAIRS_PER_VIDEO, max_things=3, max_scenes=1, max_together=3, brief_share=0.0)
    worlds = [sample_world(run.rng.randrange(TRAIN.start, TRAIN.stop), plan) for _ in range(VIDEOS_PER_STEP)]
    patches = torch.cat([video_patches(world, run.rng) for world in worlds])
    labels = torch.cat([torch.from_numpy(cell_labels(world)) for world in worlds]).view(-1, len(LABEL_NAMES))
    return patches, torch.tensor([[PAIRS_PER_VIDEO, 6, 6]] * len(worlds)), labels


def train_vision(out: Path, *, config: str, budget_s: float, seed: int, device: str) -> None:
    batch_equal_segments()
    run = Run(out, budget_s=budget_s, seed=seed)
    visual = build_model(MODEL_SIZES[config]).model.visual.to(device)
    head = nn.Linear(MODEL_SIZES[config].hidden_size, sum(LABEL_CLASSES)).to(device)
    params = [*visual.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.02, fused=True)
    parts = {"visual": visual, "head": head, "optimizer": optimizer}
    run.resume(parts)
    run.start()
    while run.clock.progress() < 1:
        factor = cosine(run.clock.progress(), step=run.step, warmup_steps=40)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        patches, grid, labels = (x.to(device) for x in make_batch(run))
        logits = head(visual(patches, grid_thw=grid).pooler_output)
        loss = label_loss(logits, labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        run.step += 1
        run.num_videos += VIDEOS_PER_STEP
        if run.step % LOG_EVERY == 0:
            run.log(loss=float(loss.detach()), **label_accuracy(logits.detach(), labels))
        if run.save_due():
            run.save(parts)
    run.save(parts)
