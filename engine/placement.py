"""Where a model's parts go when one device has no room for all of them: transformers' `device_map`, checked.

A map is one of accelerate's strategies over all GPUs, or names modules and their devices. Keys and values of all layers
lie on one device, that of the first layer; a layer elsewhere sends its new rows there and gets back what it attended.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

DeviceMap = str | dict[str, str]
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def parse_device_map(text: str) -> DeviceMap:
    """Reads a strategy's name, a JSON object {module: device}, or the path of a file that holds one.

    Raises ValueError for anything else; devices are "cpu", "cuda:N" or N.
    """
    if text in STRATEGIES:
        return text
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"a device map is {', '.join(STRATEGIES)}, a JSON object or a file of one: {error}") from error
    if not isinstance(value, dict) or not value:
        raise ValueError("a device map names at least one module")
    return {module: _device_name(module, device) for module, device in value.items()}


def device_map_flag(text: str) -> DeviceMap:
    """As `parse_device_map`, for a command line. Raises ArgumentTypeError."""
    try:
        return parse_device_map(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main_device(model: nn.Module, first_layer: nn.Module) -> torch.device:
    """Returns the device of a model's first layer, once the model is placed.

    Raises ValueError when some parts were left on the CPU or a disk beside GPUs: every step would copy their weights.
    """
    left = [name for name, weight in model.named_parameters() if weight.device.type != "cuda"]
    device = next(first_layer.parameters()).device
    is_on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    if left and not is_on_cpu:
        raise ValueError(f"the devices have no room for {len(left)} tensors of the model, from {left[0]} on")
    return device


def _device_name(module: str, device: Any) -> str:
    name = f"cuda:{device}" if isinstance(device, int) and not isinstance(device, bool) else str(device)
    try:
        is_known = torch.device(name).type in ("cpu", "cuda")
    except RuntimeError:
        is_known = False
    if not is_known:
        raise ValueError(f'the device of {module or "the model"!r} must be "cpu", "cuda:N" or N, not {device!r}')
    return name
