"""What a checkpoint folder must hold, and what is read from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.loading import LoadedModel, ModelError, load_model


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_facts_of_a_checkpoint(loaded: LoadedModel) -> None:
    assert loaded.name == "tiny"
    assert loaded.tokenizer.id_to_token(loaded.eos_token_ids[0]) == "<|im_end|>"
    assert loaded.tokenizer.id_to_token(loaded.family.video_token_id) == "<|video_pad|>"
    assert len(loaded.fingerprint) == 32
    assert "add_generation_prompt" in loaded.chat_template
    assert loaded.layout.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert type(loaded.processor).__name__ == "Qwen2_5_VLProcessor"


def test_fingerprint_follows_weights_config_tokenizer_and_dtype(copy: Path, loaded: LoadedModel) -> None:
    assert load_model(copy, load_vision=False).fingerprint == loaded.fingerprint
    seen = {loaded.fingerprint, load_model(copy, dtype="bfloat16", load_vision=False).fingerprint}
    edit(copy / "config.json", transformers_version="0")
    seen.add(load_model(copy, load_vision=False).fingerprint)
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    seen.add(load_model(copy, load_vision=False).fingerprint)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    seen.add(load_model(copy, load_vision=False).fingerprint)
    assert len(seen) == 5


def test_several_eos_ids(copy: Path) -> None:
    edit(copy / "generation_config.json", eos_token_id=[2, 0])
    assert load_model(copy, load_vision=False).eos_token_ids == (2, 0)
    (copy / "generation_config.json").unlink()
    assert load_model(copy, load_vision=False).eos_token_ids == (2,)


def test_unknown_architectures_are_refused_naming_the_known(copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ModelError, match=r"'gpt2' is not supported; known are llava_onevision, qwen2_5_vl, qwen2_vl"):
        load_model(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "lacks config.json"),
        (lambda path: (path / "tokenizer.json").unlink(), "lacks tokenizer.json"),
        (lambda path: (path / "model.safetensors").unlink(), "lacks safetensors weights"),
        (lambda path: (path / "chat_template.jinja").unlink(), "no chat template"),
        (shutil.rmtree, "is not a folder"),
    ],
)
def test_incomplete_folders_are_refused_in_words(copy: Path, change: object, message: str) -> None:
    change(copy)  # type: ignore[operator]
    with pytest.raises(ModelError, match=message):
        load_model(copy)


def test_dtypes_and_devices_are_checked(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="float32, bfloat16, float16"):
        load_model(checkpoint, dtype="int8")
    with pytest.raises(ModelError, match="not cpu or cuda"):
        load_model(checkpoint, device="meta")
