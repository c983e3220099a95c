"""Folders as real checkpoints are published: sharded, tied or not, flat configs, old names; and broken ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file
from torch import nn

from engine.attention import KvView
from engine.loading import LoadedModel, ModelError, load_model
from engine.placement import main_device, parse_device_map
from engine.positions import text_positions
from engine.runner import TextRunner
from tests.unit.engine.tiny_model import FAMILIES, write_tiny_checkpoint

INDEX = "model.safetensors.index.json"
TOKENS = list(range(20, 44))


def logits(loaded: LoadedModel) -> torch.Tensor:
    layout = loaded.layout
    rows = torch.zeros(layout.num_layers, layout.num_kv_heads, len(TOKENS), layout.head_dim, dtype=layout.dtype)
    runner = TextRunner(loaded)
    hidden = runner.forward(
        token_ids=TOKENS, positions=text_positions(0, len(TOKENS)), kv=KvView(None, (rows, rows.clone()), 0)
    )
    return runner.logits(hidden)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_shards_are_the_same_model_as_one_file(tmp_path: Path, model_type: str, is_tied: bool) -> None:
    options: dict[str, Any] = {"model_type": model_type, "is_tied": is_tied, "seed": 3}
    whole = write_tiny_checkpoint(tmp_path / "whole", **options)
    sharded = write_tiny_checkpoint(tmp_path / "sharded", **options, max_shard_size="200KB")
    assert not (whole / INDEX).exists()
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) >= 3
    assert any(name.endswith("lm_head.weight") for name in index) is not is_tied
    one, many = (load_model(folder) for folder in (whole, sharded))
    assert torch.equal(logits(one), logits(many))
    names = dict(many.model.named_parameters())
    for name, weight in one.model.named_parameters():
        assert torch.equal(weight, names[name])
    shares = many.model.lm_head.weight.data_ptr() == many.family.text_model(many.model).embed_tokens.weight.data_ptr()
    assert shares is is_tied


def as_published(folder: Path, target: Path) -> Path:
    """The same checkpoint as Qwen publishes it.

    Text settings at the top of config.json, `rope_scaling`, `torch_dtype`; the text model below "model.", the tower at
    the top; one preprocessor_config.json for images and videos; the template in tokenizer_config.json; several eos ids.
    """
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    text.pop("model_type")
    text.pop("layer_types", None)
    config.pop("dtype", None)
    flat = {**text, **config, "torch_dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(flat))
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        (target / file.name).unlink()
        weights |= load_file(file)
    for name in list(weights):
        published = name.removeprefix("model.").removeprefix("language_model.")
        published = published if published.startswith(("visual.", "lm_head.")) else f"model.{published}"
        weights[published] = weights.pop(name)
    names = sorted(weights)
    files = {name: f"model-{at % 3 + 1:05}-of-00003.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, target / file, {"format": "pt"})
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").unlink()
    edit(target / "tokenizer_config.json", chat_template=template)
    settings = json.loads((target / "processor_config.json").read_text())
    (target / "processor_config.json").unlink()
    images = settings["image_processor"]
    limits = {"min_pixels": images["size"]["shortest_edge"], "max_pixels": images["size"]["longest_edge"]}
    kept = {name: images[name] for name in ("patch_size", "temporal_patch_size", "merge_size")}
    processor = {**kept, **limits, "image_processor_type": "Qwen2VLImageProcessor"}
    processor["processor_class"] = settings["processor_class"]
    (target / "preprocessor_config.json").write_text(json.dumps(processor))
    edit(target / "generation_config.json", eos_token_id=[2, 0])
    return target


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_a_folder_as_it_is_published(tmp_path: Path, model_type: str) -> None:
    folder = write_tiny_checkpoint(tmp_path / "ours", model_type=model_type, is_tied=False, seed=4)
    published = load_model(as_published(folder, tmp_path / "published"))
    assert torch.equal(logits(published), logits(load_model(folder)))
    assert published.eos_token_ids == (2, 0)
    assert "add_generation_prompt" in published.chat_template
    frames = published.family.frames(published.processor.video_processor)
    assert (frames.temporal_patch, frames.plan(num_frames=3, height=64, width=48).shape) == (2, (2, 8, 6))


def test_auto_dtype_is_the_one_the_checkpoint_names(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "half", dtype=torch.bfloat16)
    named = load_model(folder, dtype="auto", load_vision=False)
    assert named.dtype is named.layout.dtype is torch.bfloat16
    assert named.model.lm_head.weight.dtype is torch.bfloat16
    assert named.fingerprint == load_model(folder, dtype="bfloat16", load_vision=False).fingerprint
    assert named.fingerprint != load_model(folder, load_vision=False).fingerprint


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "sharded", max_shard_size="200KB")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of .* weight files, {shard.name} among them"):
        load_model(sharded)


def test_a_cut_shard_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelError, match="sharded: "):
        load_model(sharded)


def test_weights_that_are_not_there_are_never_made_up(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = next(name for name in index["weight_map"] if "layers.1.mlp.up_proj" in name)
    shard = sharded / index["weight_map"].pop(name)
    weights = load_file(shard)
    del weights[name]
    save_file(weights, shard, {"format": "pt"})
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lack 1 tensors, model\.language_model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(sharded)


@pytest.mark.parametrize("content", ["{", "[1]", '{"model_type": 7}', '{"model_type": "no_such_thing"}', "{}"])
def test_configs_that_are_none_are_refused_in_words(sharded: Path, content: str) -> None:
    (sharded / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"is not JSON|holds no object|known are llava_onevision"):
        load_model(sharded)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_device_map_places_the_model(tmp_path: Path, model_type: str, device_map: dict[str, str]) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny", model_type=model_type, max_shard_size="200KB")
    placed = load_model(folder, device_map=device_map)
    assert placed.device == torch.device("cpu")
    assert torch.equal(logits(placed), logits(load_model(folder)))
    assert placed.fingerprint == load_model(folder, load_vision=False).fingerprint


@pytest.mark.parametrize("model_type", FAMILIES)
def test_layers_under_hooks_that_move_rows_give_the_same(tmp_path: Path, model_type: str) -> None:
    """What accelerate wraps around every module when devices differ: the step travels through it untouched."""
    loaded = load_model(write_tiny_checkpoint(tmp_path / "tiny", model_type=model_type))
    expected = logits(loaded)
    parts = {name: "cpu" for name, _ in loaded.model.named_modules() if name.count(".") == 3 or name == "lm_head"}
    parts |= {"model": "cpu"}
    dispatch_model(loaded.model, device_map=parts, main_device="cpu", force_hooks=True)
    runner = TextRunner(loaded, use_decoder=False)
    layout = loaded.layout
    rows = torch.zeros(layout.num_layers, layout.num_kv_heads, len(TOKENS), layout.head_dim)
    hidden = runner.forward(
        token_ids=TOKENS, positions=text_positions(0, len(TOKENS)), kv=KvView(None, (rows, rows.clone()), 0)
    )
    shown = torch.isfinite(expected)
    torch.testing.assert_close(runner.logits(hidden)[shown], expected[shown], atol=1e-4, rtol=0)


def test_device_maps_are_read_from_names_text_and_files(tmp_path: Path) -> None:
    assert parse_device_map("auto") == "auto"
    assert parse_device_map('{"model.visual": 0, "model.language_model": "cuda:1"}') == {
        "model.visual": "cuda:0",
        "model.language_model": "cuda:1",
    }
    (tmp_path / "map.json").write_text('{"": "cpu"}')
    assert parse_device_map(str(tmp_path / "map.json")) == {"": "cpu"}


@pytest.mark.parametrize("text", ["none.json", "{}", "[]", '{"": "disk"}', '{"": true}', '{"": "tpu"}', "{"])
def test_device_maps_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="device"):
        parse_device_map(text)


def test_weights_that_no_device_had_room_for_are_not_copied_at_every_step() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    assert main_device(model, model["first"]) == torch.device("cpu")
    model["last"].to("meta")  # what accelerate leaves of a part that waits on the CPU or a disk
    with pytest.raises(ValueError, match=r"no room for 4 tensors of the model, from first\.weight on"):
        main_device(model, model["first"])
