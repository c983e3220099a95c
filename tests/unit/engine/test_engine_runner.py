"""The runner against transformers' own forward, itself in chunks (case C4), and bit by bit in deterministic mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from engine.attention import KvView
from engine.loading import LoadedModel, load_model
from engine.positions import text_positions
from engine.probe import bit_stable
from engine.runner import TextRunner
from tests.unit.engine.tiny_model import FAMILIES, write_tiny_checkpoint

VIDEO_GRID = (8, 8, 8)
SECOND_PER_GRID = 1.5


def empty_view(loaded: LoadedModel, capacity: int, context: tuple[Tensor, Tensor] | None = None) -> KvView:
    layout = loaded.layout
    shape = (layout.num_layers, layout.num_kv_heads, capacity, layout.head_dim)
    zeros = torch.zeros(shape, dtype=layout.dtype)
    return KvView(context, (zeros, zeros.clone()), 0)


def video_prompt(loaded: LoadedModel, *, num_before: int = 5, num_after: int = 23) -> list[int]:
    family = loaded.family
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(8, 260, (num_before + num_after,), generator=generator).tolist()
    video = [family.video_token_id] * family.num_visual_tokens(VIDEO_GRID)
    start, end = family.marker_token_ids or (9, 9)
    return [*words[:num_before], start, *video, end, *words[num_before:]]


def prompt_embeds(loaded: LoadedModel, runner: TextRunner, token_ids: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    vision = loaded.model.config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(VIDEO_GRID[0] * VIDEO_GRID[1] * VIDEO_GRID[2], width, generator=generator)
    features = loaded.family.encode_video(loaded.model, pixels, torch.tensor([VIDEO_GRID]))
    embeds = runner.embed(token_ids).clone()
    embeds[torch.tensor(token_ids) == loaded.family.video_token_id] = features
    return embeds


def positions_of(loaded: LoadedModel, token_ids: list[int]) -> Tensor:
    return loaded.family.positions(token_ids, [VIDEO_GRID], [SECOND_PER_GRID]).ids


def reference_logits(checkpoint: Path, embeds: Tensor, positions: Tensor) -> Tensor:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    with torch.inference_mode():
        out = model.model.language_model(inputs_embeds=embeds[None], position_ids=positions[:, None], use_cache=False)
        logits: Tensor = model.lm_head(out.last_hidden_state)[0]
        return logits


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_vl"])
def test_logits_equal_transformers_own_forward(tmp_path: Path, model_type: str, deterministic: bool) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny", model_type=model_type, seed=1)
    loaded = load_model(checkpoint)
    runner = TextRunner(loaded, deterministic=deterministic)
    token_ids = video_prompt(loaded)
    embeds, positions = prompt_embeds(loaded, runner, token_ids), positions_of(loaded, token_ids)
    expected = reference_logits(checkpoint, embeds, positions)
    kv = empty_view(loaded, len(token_ids))
    logits = runner.logits(runner.forward(embeds=embeds, positions=positions, kv=kv))
    shown = torch.isfinite(logits)
    torch.testing.assert_close(logits[shown], expected[shown], atol=1e-4, rtol=0)
    hidden_ids = set((~shown[0]).nonzero()[:, 0].tolist())
    assert hidden_ids == {*loaded.family.placeholder_token_ids, *range(264, 272)}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_rows", [1, 6, 90])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_our_layers_have_the_bits_of_transformers_layers(
    tmp_path: Path, model_type: str, num_rows: int, deterministic: bool
) -> None:
    loaded = load_model(write_tiny_checkpoint(tmp_path / "tiny", model_type=model_type, seed=2))
    generator = torch.Generator().manual_seed(6)
    positions = torch.randint(0, 3000, (3, num_rows), generator=generator)
    token_ids = torch.randint(8, 260, (num_rows,), generator=generator).tolist()
    results = []
    for use_decoder in (True, False):
        runner = TextRunner(loaded, deterministic=deterministic, use_decoder=use_decoder)
        kv = empty_view(loaded, 130)
        runner.forward(token_ids=list(range(20, 60)), positions=text_positions(0, 40), kv=kv)
        kv.thread_len = 40
        results.append((runner.forward(token_ids=token_ids, positions=positions, kv=kv), *kv.thread))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_transformers_layers(checkpoint: Path, dtype: str, deterministic: bool) -> None:
    loaded = load_model(checkpoint, dtype=dtype)
    runner, kv = TextRunner(loaded, deterministic=deterministic), empty_view(loaded, 20)
    hidden = [runner.forward(token_ids=list(range(20, 30)), positions=text_positions(0, 10), kv=kv)]
    kv.thread_len = 10
    hidden.append(runner.forward(token_ids=[30, 31], positions=text_positions(10, 2), kv=kv))
    exact = load_model(checkpoint)
    runner, kv = TextRunner(exact), empty_view(exact, 20)
    expected = runner.forward(token_ids=list(range(20, 32)), positions=text_positions(0, 12), kv=kv)
    assert hidden[0].dtype is loaded.dtype
    assert torch.nn.functional.cosine_similarity(torch.cat(hidden).float(), expected).min() > 0.99


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("split", [10, 60, 134])
def test_context_and_thread_equal_one_piece(loaded: LoadedModel, split: int, deterministic: bool) -> None:
    runner = TextRunner(loaded, deterministic=deterministic)
    token_ids = video_prompt(loaded)
    embeds, positions = prompt_embeds(loaded, runner, token_ids), positions_of(loaded, token_ids)
    whole = empty_view(loaded, len(token_ids))
    expected = runner.logits(runner.forward(embeds=embeds, positions=positions, kv=whole))
    context = empty_view(loaded, split)
    runner.forward(embeds=embeds[:split], positions=positions[:, :split], kv=context)
    kv = empty_view(loaded, len(token_ids), context=context.thread)
    logits = runner.logits(runner.forward(embeds=embeds[split:], positions=positions[:, split:], kv=kv))
    torch.testing.assert_close(logits, expected[split:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [7, 32])
@pytest.mark.parametrize("deterministic", [False, True])
def test_chunked_prefill_makes_the_same_kv(loaded: LoadedModel, chunk: int, deterministic: bool) -> None:
    runner = TextRunner(loaded, deterministic=deterministic)
    token_ids = video_prompt(loaded)
    embeds, positions = prompt_embeds(loaded, runner, token_ids), positions_of(loaded, token_ids)
    whole, chunked = (empty_view(loaded, len(token_ids)) for _ in range(2))
    expected = runner.forward(embeds=embeds, positions=positions, kv=whole)
    for start in range(0, len(token_ids), chunk):
        part = slice(start, start + chunk)
        hidden = runner.forward(embeds=embeds[part], positions=positions[:, part], kv=chunked)
        chunked.thread_len += hidden.shape[0]
    for made, wanted in zip(chunked.thread, whole.thread, strict=True):
        torch.testing.assert_close(made, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(hidden[-1], expected[-1], atol=2e-5, rtol=1e-4)


def test_verify_block_has_the_bits_of_one_by_one_decoding(loaded: LoadedModel) -> None:
    if not bit_stable(loaded):
        pytest.skip("this machine's matrix products are not bit-stable in the number of rows")
    runner = TextRunner(loaded, deterministic=True)
    prompt = video_prompt(loaded)
    embeds, positions = prompt_embeds(loaded, runner, prompt), positions_of(loaded, prompt)
    context = empty_view(loaded, len(prompt))
    runner.forward(embeds=embeds, positions=positions, kv=context)
    start = int(positions.max()) + 1
    token_ids = torch.randint(8, 260, (70,), generator=torch.Generator().manual_seed(5)).tolist()

    def logits_in_blocks(block: int) -> Tensor:
        kv = empty_view(loaded, 75, context=context.thread)
        rows = []
        for index in range(0, len(token_ids), block):
            part = token_ids[index : index + block]
            where = text_positions(start + index, len(part))
            rows.append(runner.logits(runner.forward(token_ids=part, positions=where, kv=kv)))
            kv.thread_len += len(part)
        return torch.cat(rows)

    expected = logits_in_blocks(1)
    for block in (2, 3, 4, 6, 10, 17):
        assert torch.equal(logits_in_blocks(block), expected), block


def test_rejected_rows_leave_no_trace(loaded: LoadedModel) -> None:
    runner = TextRunner(loaded)
    kv = empty_view(loaded, 40)
    runner.forward(token_ids=list(range(20, 40)), positions=text_positions(0, 20), kv=kv)
    kv.thread_len = 20
    plain = runner.forward(token_ids=[50], positions=text_positions(20, 1), kv=kv)
    runner.forward(token_ids=[60, 61, 62], positions=text_positions(20, 3), kv=kv)
    assert torch.equal(runner.forward(token_ids=[50], positions=text_positions(20, 1), kv=kv), plain)


def test_two_runners_share_a_process(loaded: LoadedModel, tmp_path: Path) -> None:
    other = load_model(write_tiny_checkpoint(tmp_path / "other", seed=9, num_layers=3))
    runners = (TextRunner(loaded), TextRunner(other, deterministic=True))
    alone = []
    for runner, model in zip(runners, (loaded, other), strict=True):
        alone.append(runner.forward(token_ids=[20, 21], positions=text_positions(0, 2), kv=empty_view(model, 4)))
    views = (empty_view(loaded, 4), empty_view(other, 4))
    for index, token_id in enumerate((20, 21)):
        for number, (runner, kv) in enumerate(zip(runners, views, strict=True)):
            hidden = runner.forward(token_ids=[token_id], positions=text_positions(index, 1), kv=kv)
            kv.thread_len += 1
            torch.testing.assert_close(hidden[0], alone[number][index], atol=1e-5, rtol=1e-4)


def test_forward_refuses_what_the_thread_cannot_hold(loaded: LoadedModel) -> None:
    runner = TextRunner(loaded)
    kv = empty_view(loaded, 4)
    for num_tokens in (0, 5):
        with pytest.raises(ValueError, match="room for 4"):
            runner.forward(token_ids=[20] * num_tokens, positions=text_positions(0, num_tokens), kv=kv)


def test_drafter_model_has_no_vision_tower(checkpoint: Path, loaded: LoadedModel) -> None:
    slim = load_model(checkpoint, load_vision=False)
    assert slim.processor is None
    assert slim.fingerprint == loaded.fingerprint
    hidden = [
        TextRunner(model).forward(token_ids=[20, 21], positions=text_positions(0, 2), kv=empty_view(model, 2))
        for model in (loaded, slim)
    ]
    assert torch.equal(hidden[0], hidden[1])
    assert sum(each.numel() for each in slim.model.parameters()) < sum(
        each.numel() for each in loaded.model.parameters()
    )
