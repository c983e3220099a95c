"""A model cut short: its first layers, then its own final norm and head. Weights are shared, not copied."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from engine.loading import LoadedModel


def early_exit(loaded: LoadedModel, num_layers: int) -> LoadedModel:
    """Returns the first `num_layers` layers of a model. Raises ValueError when there are fewer, or none are asked for.

    Its fingerprint is the whole model's: the KV of its layers is the whole model's too.
    """
    if not 1 <= num_layers <= loaded.layout.num_layers:
        raise ValueError(f"num_layers must be 1 to {loaded.layout.num_layers}, not {num_layers}")
    text = loaded.family.text_model(loaded.model)
    path = next(name for name, module in loaded.model.named_modules() if module is text)
    cut = parent = _twin(loaded.model)
    for name in path.split("."):
        twin = _twin(getattr(parent, name))
        setattr(parent, name, twin)
        parent = twin
    parent.layers = parent.layers[:num_layers]
    return replace(loaded, model=cut, processor=None, layout=replace(loaded.layout, num_layers=num_layers))


def _twin(module: Any) -> Any:
    """Returns a module with the same parameters and children, whose children can be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
