from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from bench.world import held_out
from bench.world.draw import draw
from bench.world.families import FAMILIES, WorldFamily, family_of
from bench.world.model import MODEL_SIZES
from bench.world.train.language import save_checkpoint

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@EVERY_FAMILY
@pytest.mark.parametrize("config", MODEL_SIZES)
def test_the_models_have_real_proportions(family: WorldFamily, config: str) -> None:
    text = family.build_config(MODEL_SIZES[config]).text_config
    assert text.hidden_size // text.num_attention_heads == 32
    assert text.num_attention_heads % text.num_key_value_heads == 0
    assert text.max_position_embeddings >= 131072


@EVERY_FAMILY
def test_a_saved_checkpoint_is_bf16_and_leaves_the_model_as_it_was(family: WorldFamily, tmp_path: Path) -> None:
    model = family.build_model(MODEL_SIZES["target"])
    save_checkpoint(model, family.build_processor(), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    assert sum(value.numel() for value in saved.values()) == sum(param.numel() for param in model.parameters())
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.lm_head.weight is loaded.model.language_model.embed_tokens.weight
    assert type(AutoProcessor.from_pretrained(tmp_path)) is type(family.build_processor())
    assert family_of(tmp_path) is family
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 8e6


@EVERY_FAMILY
def test_videos_of_a_batch_are_encoded_as_if_alone(family: WorldFamily) -> None:
    model = family.build_model(MODEL_SIZES["drafter"])
    frames = [draw(held_out("caption", index, num_frame_pairs=3).world).astype("float32") for index in range(2)]
    patches = [family.patches(one) for one in frames]
    together = family.encode(model, torch.cat(patches), 2)
    alone = torch.cat([family.encode(model, one, 1) for one in patches])
    assert together.shape == (2 * family.num_visual_tokens(3), MODEL_SIZES["drafter"].hidden_size)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert family.cell_features(together, 2).shape[0] == 2 * 3 * 9


@EVERY_FAMILY
def test_vision_and_text_are_the_whole_model(family: WorldFamily) -> None:
    model = family.build_model(MODEL_SIZES["drafter"])
    vision = sum(param.numel() for param in family.vision_parts(model).parameters())
    text = sum(param.numel() for param in model.model.language_model.parameters())
    assert vision + text == sum(param.numel() for param in model.parameters())


def test_only_qwen2_5_vl_is_told_the_time() -> None:
    families = FAMILIES["qwen2_5_vl"], FAMILIES["qwen2_vl"]
    qwen25, qwen2 = (family.video_positions(3, 3, family.interval(2.0)) for family in families)
    assert qwen25[0, ::9].tolist() == [3, 7, 11]
    assert qwen2[0, ::9].tolist() == [3, 4, 5]
    assert qwen25[1:].tolist() == qwen2[1:].tolist()


def test_llava_onevision_stands_in_one_line() -> None:
    ids = FAMILIES["llava_onevision"].video_positions(4, 2, 1.0)
    assert ids.tolist() == [list(range(4, 4 + 19))] * 3
    spread = FAMILIES["llava_onevision"].video_positions(0, 2, 10.0)
    assert spread[0].tolist() == [*range(9), *range(90, 100)]
