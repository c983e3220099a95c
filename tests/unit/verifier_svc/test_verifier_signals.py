"""What a round's reply carries beside the target's tokens: only what was asked for, and right."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention import KvView
from engine.positions import text_positions
from engine.relevance import RelevanceSettings, log_probabilities, top_entropy
from foveate.rpc.errors import FailedPrecondition, InvalidArgument
from foveate.v1 import verifier_pb2
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Served, config_for, serving
from verifier_svc.contexts import HeldContext
from verifier_svc.verifier import Verifier

CLIP = clips.clip(9)
ALL = verifier_pb2.Signals(relevance=True, entropy=True, log_probabilities=True)
DRAFTS = (40, 41, 42)


@pytest.fixture
async def served(checkpoint: Path) -> AsyncIterator[Served]:
    async with serving(config_for(checkpoint)) as started:
        yield started


async def first_round(served: Served, signals: verifier_pb2.Signals | None) -> verifier_pb2.RoundVerified:
    context = await served.prefill(CLIP, fps=4)
    async with served.answering(context.name, signals=signals) as stream:
        first = stream.opened.first_token_id
        return await stream.repeat(1, stream.opened.num_prompt_tokens, [first], DRAFTS)


def reference(verifier: Verifier, token_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompt, question and `token_ids` in one plain forward: hidden states of every layer [layers + 1, tokens, hidden],
    logits of the last four places, and which tokens are visual."""
    parts = verifier.parts
    (held,) = verifier.contexts.newest_first()
    facts = held.facts
    prompt = parts.prompts.thread((), "What?").token_ids
    keys, values = parts.pool.views(held.slab)
    thread = torch.zeros(*keys.shape[:2], 64, keys.shape[3]), torch.zeros(*values.shape[:2], 64, values.shape[3])
    hidden = parts.runner.forward(
        token_ids=[*prompt, *token_ids],
        positions=text_positions(facts.num_tokens + facts.position_delta, len(prompt) + len(token_ids)),
        kv=KvView((keys, values), thread, 0),
    )
    table = parts.pool.tensor_view(held.tensors[parts.relevance.tensor_name])
    return hidden, parts.runner.logits(hidden[-4:]), table


async def test_nothing_is_measured_unless_asked_for(served: Served) -> None:
    plain = await first_round(served, None)
    measured_anything = (plain.relevance, plain.entropy, plain.draft_log_probabilities, plain.target_log_probabilities)
    assert not any(measured_anything)
    measured = await first_round(served, ALL)
    assert measured.target_token_ids == plain.target_token_ids
    assert (len(measured.relevance), len(measured.entropy)) == (4, 4)
    assert (len(measured.draft_log_probabilities), len(measured.target_log_probabilities)) == (3, 4)


async def test_what_is_measured_is_right(served: Served) -> None:
    measured = await first_round(served, ALL)
    async with served.answering((await served.prefill(CLIP, fps=4)).name) as stream:
        first = stream.opened.first_token_id
    hidden, logits, table = await served.verifier.device.run(reference, served.verifier, (first, *DRAFTS))
    assert measured.entropy == pytest.approx(top_entropy(logits).tolist(), abs=1e-4)
    assert measured.draft_log_probabilities == pytest.approx(log_probabilities(logits, DRAFTS).tolist(), abs=1e-3)
    targets = tuple(measured.target_token_ids)
    assert measured.target_log_probabilities == pytest.approx(log_probabilities(logits, targets).tolist(), abs=1e-3)
    settings = served.verifier.parts.relevance
    expected = settings.scores(hidden[-4:], table, settings.num_nearest).tolist()
    assert measured.relevance == pytest.approx(expected, abs=1e-4)


def with_settings(checkpoint: Path, folder: Path, settings: RelevanceSettings) -> Path:
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    settings.write(folder)
    return folder


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("at_predicting", [True, False])
async def test_a_models_own_settings_are_used(
    checkpoint: Path, tmp_path: Path, layer: int, at_predicting: bool
) -> None:
    settings = RelevanceSettings(layer, at_predicting, is_centred=True, num_nearest=2)
    async with serving(config_for(with_settings(checkpoint, tmp_path / "model", settings))) as own:
        info = await own.stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest())
        assert (info.relevance.layer, info.relevance.at_predicting, info.relevance.num_nearest) == (
            layer,
            at_predicting,
            2,
        )
        held = await held_by(own)
        assert list(held.tensors) == [settings.tensor_name]
        table = await own.verifier.device.run(own.verifier.parts.pool.tensor_view, held.tensors[settings.tensor_name])
        assert table.shape[0] == 1 + held.facts.num_visual_tokens
        assert table[1:].norm(dim=-1).tolist() == pytest.approx([1.0] * held.facts.num_visual_tokens, abs=1e-5)
        assert float(table[0].norm()) > 0
        measured = await first_round(own, verifier_pb2.Signals(relevance=True))
        nearer = await first_round(own, verifier_pb2.Signals(relevance=True, num_nearest=1))
        unmeasured = await first_round(own, verifier_pb2.Signals(log_probabilities=True))
        both = await first_round(own, verifier_pb2.Signals(log_probabilities=True, relevance=True))
        # Bit for bit: measuring relevance changes nothing else, whichever layer it looks at.
        assert both.target_log_probabilities == unmeasured.target_log_probabilities
        assert all(-1 <= score <= 1 and not math.isnan(score) for score in measured.relevance)
        assert all(one >= other for one, other in zip(nearer.relevance, measured.relevance, strict=True))


async def held_by(served: Served) -> HeldContext:
    context = await served.prefill(CLIP, fps=4)
    held = served.verifier.contexts.get(context.name.removeprefix("contexts/"))
    assert held is not None
    return held


async def test_chunks_of_any_size_keep_the_same_states(checkpoint: Path) -> None:
    tables = []
    for chunk in (7, 512):
        async with serving(replace(config_for(checkpoint), prefill_chunk_tokens=chunk)) as own:
            slab = (await held_by(own)).tensors[own.verifier.parts.relevance.tensor_name]
            tables.append((await own.verifier.device.run(own.verifier.parts.pool.tensor_view, slab)).clone())
    assert torch.allclose(tables[0], tables[1], atol=1e-5)


async def test_a_verifier_that_keeps_no_states_says_so(checkpoint: Path) -> None:
    async with serving(config_for(checkpoint, keep_visual_states=False)) as own:
        info = await own.stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest())
        assert not info.HasField("relevance")
        with pytest.raises(FailedPrecondition) as caught:
            await first_round(own, ALL)
        assert caught.value.reason == "NO_VISUAL_STATES"


async def test_a_wrong_number_of_neighbours_is_refused(served: Served) -> None:
    for number in (0, 1025):
        with pytest.raises(InvalidArgument) as caught:
            await first_round(served, verifier_pb2.Signals(relevance=True, num_nearest=number))
        assert [violation.field for violation in caught.value.violations] == ["open.signals.num_nearest"]
