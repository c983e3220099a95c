"""A checkpoint folder -> everything the engine needs of it. Local files only: no hub, no remote code."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from engine.attention import IMPLEMENTATION_NAME
from engine.families import FAMILIES, Family, family_of
from engine.layout import DTYPES, KvLayout, dtype_name
from engine.placement import DeviceMap, main_device

# The dtype that the checkpoint itself names.
AUTO_DTYPE = "auto"
_FINGERPRINT_HEX = 32
_INDEX = "model.safetensors.index.json"

# A service's stderr is for its log.
transformers_logging.disable_progress_bar()


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, with what belongs to it.

    `fingerprint` covers config, weights, tokenizer and dtype: equal fingerprints mean equal KV for equal input.
    `processor` is None when the vision tower was not loaded. `device` is where keys and values lie; under a device map
    other layers may lie elsewhere.
    """

    name: str
    model: Any
    processor: Any
    tokenizer: tokenizers.Tokenizer
    tokenizer_json: bytes
    tokenizer_sha256: str
    chat_template: str
    family: Family
    device: torch.device
    dtype: torch.dtype
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    layout: KvLayout


class ModelError(Exception):
    """The folder is not a checkpoint this engine can run; the text says why, in one line."""


def load_model(
    path: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    load_vision: bool = True,
    device_map: DeviceMap | None = None,
) -> LoadedModel:
    """Loads the checkpoint in folder `path`; raises ModelError when it cannot be run.

    `dtype` "auto" is the one the checkpoint names. A `device_map` spreads the model and takes `device`'s place.
    """
    if dtype not in (*DTYPES, AUTO_DTYPE):
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}, {AUTO_DTYPE}")
    _require(path, "config.json", "tokenizer.json")
    _require_known(path)
    _require_shards(path)
    target = _device(device) if device_map is None else None
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        family = family_of(config)
        wanted = _dtype(dtype, config)
        model = _weights(path, wanted, device_map)
        if target is None:
            target = main_device(model, family.text_model(model).layers[0])
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path}: {_one_line(error)}") from error
    model.set_attn_implementation({"text_config": IMPLEMENTATION_NAME, "vision_config": "sdpa"})
    if not load_vision:
        family.drop_vision(model)
    if device_map is None:
        model.to(target)
    tokenizer_json = (path / "tokenizer.json").read_bytes()
    return LoadedModel(
        name=path.resolve().name,
        model=model.eval().requires_grad_(False),
        processor=_processor(path) if load_vision else None,
        tokenizer=tokenizers.Tokenizer.from_str(tokenizer_json.decode()),
        tokenizer_json=tokenizer_json,
        tokenizer_sha256=hashlib.sha256(tokenizer_json).hexdigest(),
        chat_template=_chat_template(path),
        family=family,
        device=target,
        dtype=wanted,
        fingerprint=fingerprint(path, dtype_name(wanted)),
        eos_token_ids=_eos_token_ids(path, config),
        layout=layout_of(config.text_config, wanted),
    )


def layout_of(text_config: Any, dtype: torch.dtype) -> KvLayout:
    """The KV layout of a text model's config."""
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return KvLayout(text_config.num_hidden_layers, text_config.num_key_value_heads, head_dim, dtype)


def fingerprint(path: Path, dtype: str) -> str:
    """Returns 128 bits, hex, over config, every weight file, tokenizer and the dtype weights are run in.

    The files are read at the same time: of a large model they are many, and hashing one keeps one core busy.
    """
    files = (path / "config.json", *sorted(path.glob("*.safetensors")), path / "tokenizer.json")
    digest = hashlib.sha256(dtype.encode())
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as readers:
        for file, content in zip(files, readers.map(_content_digest, files), strict=True):
            digest.update(f"|{file.name}|{file.stat().st_size}|".encode() + content)
    return digest.hexdigest()[:_FINGERPRINT_HEX]


def _content_digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _weights(path: Path, dtype: torch.dtype, device_map: DeviceMap | None) -> Any:
    """Loads the weights; raises ValueError when the files hold none for some part, which would be left random."""
    model, info = AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, local_files_only=True, output_loading_info=True, device_map=device_map
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"the weights lack {len(missing)} tensors, {missing[0]} among them")
    return model


def _one_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _processor(path: Path) -> Any:
    # Imports torchvision and, with it, half of torch's compiler: seconds that a text-only process need not spend.
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(path, local_files_only=True)


def _require(path: Path, *names: str) -> None:
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder; a checkpoint is a local folder as written by save_pretrained")
    missing = [name for name in names if not (path / name).is_file()]
    if missing or not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} lacks {', '.join(missing) or 'safetensors weights'}")


def _require_known(path: Path) -> None:
    """Raises ModelError for an architecture that is none of ours, also where transformers does not know it either."""
    model_type = _read_json(path / "config.json").get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(f"{path}: model_type {model_type!r} is not supported; known are {', '.join(sorted(FAMILIES))}")


def _require_shards(path: Path) -> None:
    """Raises ModelError when the index of a sharded checkpoint names files that are not there."""
    shards = set(_read_json(path / _INDEX).get("weight_map", {}).values())
    missing = sorted(shard for shard in shards if not (path / shard).is_file())
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} of {len(shards)} weight files, {missing[0]} among them")


def _dtype(name: str, config: Any) -> torch.dtype:
    if name != AUTO_DTYPE:
        return DTYPES[name]
    declared = config.dtype or getattr(config.text_config, "dtype", None) or torch.float32
    dtype_name(declared)  # ValueError for one that no KV is kept in
    assert isinstance(declared, torch.dtype)
    return declared


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is not cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name!r} was asked for, but torch sees no CUDA device")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _chat_template(path: Path) -> str:
    template = path / "chat_template.jinja"
    if template.is_file():
        return template.read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        settings = _read_json(path / name)
        if isinstance(settings.get("chat_template"), str):
            return str(settings["chat_template"])
    raise ModelError(f"{path} has no chat template")


def _eos_token_ids(path: Path, config: Any) -> tuple[int, ...]:
    declared = _read_json(path / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = config.text_config.eos_token_id
    if declared is None:
        raise ModelError(f"{path} names no eos_token_id in generation_config.json or config.json")
    return tuple(declared) if isinstance(declared, list) else (int(declared),)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no object")
    return value
