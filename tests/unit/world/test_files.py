from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from bench.world import held_out, read_mp4, write_mp4
from bench.world.draw import draw
from bench.world.families import FAMILIES, WorldFamily
from bench.world.families.qwen_parts import patchify


@pytest.fixture(scope="module")
def processor() -> Any:
    return FAMILIES["qwen2_5_vl"].build_processor()


def patches(processor: Any, frames: np.ndarray) -> dict[str, torch.Tensor]:
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    return processor.video_processor(videos=[video], return_tensors="pt")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_direct_patches_equal_the_processors(family: WorldFamily) -> None:
    frames = draw(held_out("caption", 1, num_frame_pairs=8).world)
    expected = patches(family.build_processor(), frames[:: family.frame_stride])["pixel_values_videos"]
    direct = family.patches(frames.astype(np.float32))
    torch.testing.assert_close(direct, expected.reshape(direct.shape), atol=1e-5, rtol=0)


@pytest.mark.parametrize("index", range(3))
def test_a_file_gives_nearly_the_direct_patches(processor: Any, tmp_path: Path, index: int) -> None:
    world = held_out("describe", index, num_frame_pairs=12).world
    write_mp4(world, tmp_path / "video.mp4")
    from_file = patches(processor, read_mp4(tmp_path / "video.mp4"))
    direct = patchify(draw(world).astype(np.float32))
    assert from_file["video_grid_thw"].tolist() == [[12, 6, 6]]
    difference = (from_file["pixel_values_videos"] - direct).abs() * 127.5  # of 255
    assert difference.mean() < 3
    assert difference.quantile(0.99) < 16


def test_a_file_has_the_rate_and_length_asked_for(tmp_path: Path) -> None:
    write_mp4(held_out("caption", 0, num_frame_pairs=50).world, tmp_path / "video.mp4", fps=8.0)
    with av.open(str(tmp_path / "video.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.average_rate, stream.width, stream.height) == (100, 8, 192, 192)


@pytest.mark.parametrize(
    "size", [(192, 192), (48, 48), (360, 640), (1280, 720), (100, 1000), (30, 40), (16, 16), (51, 50)]
)
def test_frames_of_any_size_become_at_most_nine_tokens_a_pair(processor: Any, size: tuple[int, int]) -> None:
    frames = np.zeros((2, *size, 3), np.uint8)
    _, h, w = patches(processor, frames)["video_grid_thw"][0].tolist()
    assert h * w // 4 <= 9


@pytest.mark.parametrize("num_frames", [1, 2, 3, 600])
def test_the_size_of_a_frame_does_not_depend_on_the_length(processor: Any, num_frames: int) -> None:
    frames = np.zeros((num_frames, 192, 192, 3), np.uint8)
    assert patches(processor, frames)["video_grid_thw"].tolist() == [[-(-num_frames // 2), 6, 6]]
