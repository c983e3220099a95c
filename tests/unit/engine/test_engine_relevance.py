"""Relevance, entropy and log-probabilities against their definitions; taps; settings beside a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from engine.attention import KvView
from engine.kv_pool import KvPool
from engine.loading import LoadedModel, load_model
from engine.positions import text_positions
from engine.relevance import LayerTap, RelevanceSettings, log_probabilities, top_entropy
from engine.runner import TextRunner
from tests.unit.engine.tiny_model import write_tiny_checkpoint

SETTINGS = RelevanceSettings(layer=2)


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("num_nearest", [1, 3, 50])
def test_relevance_is_the_mean_of_the_largest_cosines(is_centred: bool, num_nearest: int) -> None:
    generator = torch.Generator().manual_seed(1)
    visual, states = torch.randn(20, 8, generator=generator) + 1, torch.randn(4, 8, generator=generator)
    settings = replace(SETTINGS, is_centred=is_centred)
    scores = settings.scores(states, settings.visual_table(visual), num_nearest)
    centre = visual.mean(0) if is_centred else torch.zeros(8)
    for row, score in enumerate(scores.tolist()):
        cosines = [
            float(torch.dot(states[row] - centre, one - centre))
            / float((states[row] - centre).norm() * (one - centre).norm())
            for one in visual
        ]
        nearest = sorted(cosines, reverse=True)[:num_nearest]
        assert score == pytest.approx(sum(nearest) / len(nearest), abs=1e-5)


def test_rows_of_the_places() -> None:
    # Two committed tokens and three drafts were fed: rows 0 to 4. The last committed one predicts the first draft.
    assert list(range(5))[SETTINGS.rows(3, 5)] == [1, 2, 3, 4]
    read = replace(SETTINGS, at_predicting=False).rows(3, 5)
    assert isinstance(read, torch.Tensor)
    assert read.tolist() == [2, 3, 4, 4]
    assert list(range(2))[SETTINGS.rows(0, 2)] == [1]


def test_entropy_of_the_three_likeliest() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0, -1.0], [9.0, -99.0, -99.0, -99.0, -math.inf], [0.0] * 5])
    p = torch.softmax(logits[0].double(), -1).tolist()
    expected = -sum(value * math.log(value) for value in sorted(p)[-3:])
    assert top_entropy(logits).tolist() == pytest.approx([expected, 0.0, -3 * 0.2 * math.log(0.2)], abs=1e-6)


def test_log_probabilities() -> None:
    logits = torch.tensor([[3.0, 1.0, -math.inf], [0.0, 0.0, 0.0]])
    values = log_probabilities(logits, (1, 2)).tolist()
    assert values == pytest.approx([1 - math.log(math.exp(3) + math.exp(1)), -math.log(3)], abs=1e-6)
    assert log_probabilities(logits, (2,)).tolist() == [-math.inf]
    assert log_probabilities(logits, ()).numel() == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint)


@pytest.mark.parametrize("use_decoder", [True, False])
def test_a_tap_sees_what_transformers_calls_hidden_states(
    checkpoint: Path, loaded: LoadedModel, use_decoder: bool
) -> None:
    token_ids = list(range(20, 30))
    stock = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = stock(
            input_ids=torch.tensor([token_ids]), position_ids=text_positions(0, 10)[:, None], output_hidden_states=True
        ).hidden_states
    runner = TextRunner(loaded, use_decoder=use_decoder)
    pool = KvPool.create(loaded.layout, pool_bytes=1 << 20, device=loaded.device, model_fingerprint=loaded.fingerprint)
    for layer in range(loaded.layout.num_layers + 1):
        tap = LayerTap(layer)
        kv = KvView(None, pool.views(pool.allocate(16)), 0)
        hidden = runner.forward(token_ids=token_ids, positions=text_positions(0, 10), kv=kv, layer_tap=tap)
        assert torch.allclose(tap.states, expected[layer][0], atol=1e-4), layer
    assert torch.equal(hidden, tap.states)
    pool.close()


def test_settings_stay_with_the_checkpoint(tmp_path: Path) -> None:
    assert RelevanceSettings.read(tmp_path, 6) == RelevanceSettings(layer=6)
    (tmp_path / "foveate.json").write_text(json.dumps({"other": 1}))
    settings = RelevanceSettings(5, False, True, 7, (0.0, 0.25))
    settings.write(tmp_path)
    assert RelevanceSettings.read(tmp_path, 6) == settings
    assert json.loads((tmp_path / "foveate.json").read_text())["other"] == 1
    with pytest.raises(ValueError, match="layer"):
        RelevanceSettings.read(tmp_path, 4)
    (tmp_path / "foveate.json").write_text(json.dumps({"relevance": {"depth": 3}}))
    with pytest.raises(ValueError, match="depth"):
        RelevanceSettings.read(tmp_path, 6)


def test_the_kept_tensor_is_named_after_what_it_holds() -> None:
    assert SETTINGS.tensor_name == "visual_states/layer2/raw"
    assert replace(SETTINGS, layer=0, is_centred=True).tensor_name == "visual_states/layer0/centred"
