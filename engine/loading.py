"""A checkpoint folder -> everything the engine needs of it. Local files only: no hub, no remote code."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from engine.attention import IMPLEMENTATION_NAME
from engine.families import Family, family_of
from engine.layout import DTYPES, KvLayout

_FINGERPRINT_HEX = 32

# A service's stderr is for its log.
transformers_logging.disable_progress_bar()


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, with what belongs to it.

    `fingerprint` covers config, weights, tokenizer and dtype: equal fingerprints mean equal KV for equal input.
    `processor` is None when the vision tower was not loaded.
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


def load_model(path: Path, *, device: str = "cpu", dtype: str = "float32", load_vision: bool = True) -> LoadedModel:
    """Loads the checkpoint in folder `path`; raises ModelError when it cannot be run."""
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    _require(path, "config.json", "tokenizer.json")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    try:
        family = family_of(config)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    target = _device(device)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=DTYPES[dtype], local_files_only=True)
    model.set_attn_implementation({"text_config": IMPLEMENTATION_NAME, "vision_config": "sdpa"})
    if not load_vision:
        family.drop_vision(model)
    tokenizer_json = (path / "tokenizer.json").read_bytes()
    return LoadedModel(
        name=path.resolve().name,
        model=model.to(target).eval().requires_grad_(False),
        processor=_processor(path) if load_vision else None,
        tokenizer=tokenizers.Tokenizer.from_str(tokenizer_json.decode()),
        tokenizer_json=tokenizer_json,
        tokenizer_sha256=hashlib.sha256(tokenizer_json).hexdigest(),
        chat_template=_chat_template(path),
        family=family,
        device=target,
        dtype=DTYPES[dtype],
        fingerprint=fingerprint(path, dtype),
        eos_token_ids=_eos_token_ids(path, config),
        layout=layout_of(config.text_config, DTYPES[dtype]),
    )


def layout_of(text_config: Any, dtype: torch.dtype) -> KvLayout:
    """The KV layout of a text model's config."""
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return KvLayout(text_config.num_hidden_layers, text_config.num_key_value_heads, head_dim, dtype)


def fingerprint(path: Path, dtype: str) -> str:
    """Returns 128 bits, hex, over config, every weight file, tokenizer and the dtype weights are run in."""
    digest = hashlib.sha256(dtype.encode())
    for file in (path / "config.json", *sorted(path.glob("*.safetensors")), path / "tokenizer.json"):
        digest.update(f"|{file.name}|{file.stat().st_size}|".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:_FINGERPRINT_HEX]


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
    for name in ("tokenizer_config.json", "chat_template.json"):
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
    return dict(json.loads(path.read_text())) if path.is_file() else {}
