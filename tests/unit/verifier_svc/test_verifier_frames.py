"""Frames to patches: chunks equal the whole, and the plan is what comes out (case V5)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2VLVideoProcessor

from engine.families.qwen_frames import QwenFrames
from engine.frames import Grid
from engine.loading import LoadedModel, load_model
from foveate.rpc.errors import InvalidArgument


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint)


def processor(**settings: object) -> Qwen2VLVideoProcessor:
    size = {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}
    common = {"patch_size": 8, "merge_size": 2, "size": size, "do_sample_frames": False, "cap_pixels_per_frame": False}
    return Qwen2VLVideoProcessor(**(common | {"temporal_patch_size": 2} | settings))


def frames_of(num_frames: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(num_frames).integers(0, 256, (num_frames, height, width, 3), np.uint8)


@pytest.mark.parametrize("temporal_patch", [2, 4])
@pytest.mark.parametrize("num_frames", range(1, 10))
def test_chunks_are_the_whole_and_the_plan_is_the_outcome(num_frames: int, temporal_patch: int) -> None:
    video_processor = processor(temporal_patch_size=temporal_patch)
    frames = frames_of(num_frames, 61, 97)
    whole = video_processor(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    ours = QwenFrames(video_processor)
    step = temporal_patch
    pieces = [ours.process(frames[at : at + step], num_frames_of_video=num_frames) for at in range(0, num_frames, step)]
    assert torch.equal(torch.cat([patches for patches, _ in pieces]), whole["pixel_values_videos"])
    plan = ours.plan(num_frames=num_frames, height=61, width=97)
    assert torch.equal(plan.as_tensor(), whole["video_grid_thw"])
    assert plan.num_temporal == -(-num_frames // temporal_patch) == sum(grid.num_temporal for _, grid in pieces)
    assert plan.num_patches == whole["pixel_values_videos"].shape[0]


def test_the_cap_by_number_of_frames_is_that_of_the_whole_video() -> None:
    video_processor = processor(cap_pixels_per_frame=True, max_video_tokens=60)
    frames = frames_of(12, 96, 96)
    whole = video_processor(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    ours = QwenFrames(video_processor)
    pieces = [ours.process(frames[at : at + 4], num_frames_of_video=12) for at in range(0, 12, 4)]
    assert torch.equal(torch.cat([patches for patches, _ in pieces]), whole["pixel_values_videos"])
    assert ours.plan(num_frames=12, height=96, width=96) == Grid(6, 6, 6)
    assert ours.plan(num_frames=2, height=96, width=96) == Grid(1, 12, 12)


@pytest.mark.parametrize("num_frames", range(1, 10))
def test_embeddings_are_as_many_as_planned(num_frames: int, loaded: LoadedModel) -> None:
    ours = QwenFrames(loaded.processor.video_processor)
    patches, grid = ours.process(frames_of(num_frames, 64, 48), num_frames_of_video=num_frames)
    features = loaded.family.encode_video(loaded.model, patches, grid.as_tensor())
    plan = ours.plan(num_frames=num_frames, height=64, width=48)
    assert features.shape[0] == loaded.family.num_visual_tokens(plan.shape) == 12 * -(-num_frames // 2)


@pytest.mark.parametrize(("height", "width"), [(1, 1000), (0, 10)])
def test_shapes_the_model_cannot_look_at(height: int, width: int) -> None:
    with pytest.raises(InvalidArgument, match="cannot look at"):
        QwenFrames(processor()).plan(num_frames=1, height=height, width=width)
