import json
from pathlib import Path

import pytest
import torch

from bench.world.model import MODEL_SIZES, build_config, build_model
from bench.world.train.curriculum import STAGES, lesson, samples
from bench.world.train.language import save_checkpoint
from bench.world.train.pixels import LABEL_CLASSES, UNLABELLED, cell_labels
from bench.world.train.run import Run, cosine


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    first = Run(tmp_path, budget_s=100, seed=3)
    layer = torch.nn.Linear(2, 2)
    first.start()
    first.rng.random()
    first.step, first.num_videos = 5, 40
    first.save({"layer": layer})
    expected = first.rng.random(), torch.rand(1)

    second, other = Run(tmp_path, budget_s=100, seed=4), torch.nn.Linear(2, 2)
    assert second.resume({"layer": other})
    assert (second.step, second.num_videos) == (5, 40)
    assert (second.rng.random(), torch.rand(1)) == expected
    assert torch.equal(layer.weight, other.weight)
    second.log(loss=0.5)
    assert json.loads((tmp_path / "curve.jsonl").read_text())["loss"] == 0.5


def test_a_new_run_has_nothing_to_resume(tmp_path: Path) -> None:
    assert not Run(tmp_path, budget_s=1, seed=0).resume({})


def test_the_rate_warms_up_and_reaches_its_floor_at_the_deadline() -> None:
    assert cosine(0.0, step=0, warmup_steps=10) == pytest.approx(0.1)
    assert cosine(0.0, step=10, warmup_steps=10) == pytest.approx(1.0)
    assert cosine(1.0, step=1000, warmup_steps=10, floor=0.03) == pytest.approx(0.03)


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
def test_lessons_keep_to_their_stage(progress: float) -> None:
    import random

    rng = random.Random(0)
    stage = next(stage for stage in STAGES if progress <= stage.until)
    for _ in range(5):
        now = lesson(rng, progress)
        assert now.num_pairs in stage.num_pairs
        for world in now.worlds[:2]:
            labels = cell_labels(world)
            assert ((labels == UNLABELLED) | (labels < torch.tensor(LABEL_CLASSES).numpy())).all()
            assert samples(rng, world)


@pytest.mark.parametrize("config", MODEL_SIZES)
def test_the_models_have_real_proportions(config: str) -> None:
    text = build_config(MODEL_SIZES[config]).text_config
    assert text.hidden_size // text.num_attention_heads == 32
    assert text.num_attention_heads % text.num_key_value_heads == 0
    assert text.max_position_embeddings >= 131072


def test_a_saved_checkpoint_is_bf16_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from bench.world.processor import build_processor

    model = build_model(MODEL_SIZES["drafter"])
    save_checkpoint(model, build_processor(), tmp_path)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert type(AutoProcessor.from_pretrained(tmp_path)).__name__ == "Qwen2_5_VLProcessor"
