"""The compiled step: against PyTorch's kernels, bit by bit against itself, and where it cannot be built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention import KvView
from engine.loading import LoadedModel, load_model
from engine.native import build
from engine.native.decoder import MAX_ROWS
from engine.positions import text_positions
from engine.runner import TextRunner
from foveate.checkpoints import default_checkpoint
from tests.unit.engine.tiny_model import write_tiny_checkpoint

THREAD_LEN = 70  # more than one block of keys, and not a whole one


@pytest.fixture(scope="module", params=["embedded", "qwen2_vl, head_dim 128"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    if request.param == "embedded":
        return load_model(default_checkpoint(), load_vision=False)
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("wide"), model_type="qwen2_vl", head_dim=128)
    return load_model(folder, load_vision=False)


@pytest.fixture(scope="module")
def native(loaded: LoadedModel) -> TextRunner:
    runner = TextRunner(loaded)
    if runner.kernel_name != "cpu-native":
        pytest.skip("no C compiler here")
    return runner


@pytest.fixture
def fresh_build() -> Iterator[None]:
    build.load.cache_clear()
    yield
    build.load.cache_clear()


def random_view(loaded: LoadedModel, context_len: int) -> KvView:
    layout = loaded.layout
    generator = torch.Generator().manual_seed(context_len)

    def rows(capacity: int) -> tuple[Tensor, Tensor]:
        shape = (layout.num_layers, layout.num_kv_heads, capacity, layout.head_dim)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    return KvView(rows(context_len) if context_len else None, rows(THREAD_LEN + MAX_ROWS), THREAD_LEN)


def steps(runner: TextRunner, kv: KvView, token_ids: list[int], *, block: int) -> tuple[Tensor, Tensor]:
    """Runs tokens block by block from THREAD_LEN; returns logits and the thread's keys."""
    logits = []
    kv.thread_len = THREAD_LEN
    for start in range(0, len(token_ids), block):
        part = token_ids[start : start + block]
        positions = text_positions(kv.context_len + kv.thread_len, len(part))
        logits.append(runner.logits(runner.step(token_ids=part, positions=positions, kv=kv)))
        kv.thread_len += len(part)
    return torch.cat(logits), kv.thread[0].clone()


@pytest.mark.parametrize("context_len", [0, 1, 64, 1000, 5000])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 17])
def test_a_step_computes_what_pytorch_does(
    loaded: LoadedModel, native: TextRunner, context_len: int, num_rows: int
) -> None:
    plain = TextRunner(loaded, use_native=False)
    kv, token_ids = random_view(loaded, context_len), list(range(20, 20 + num_rows))
    expected, expected_keys = steps(plain, kv, token_ids, block=num_rows)
    logits, keys = steps(native, kv, token_ids, block=num_rows)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(keys, expected_keys, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("context_len", [0, 63, 2049])
@pytest.mark.parametrize("block", [2, 3, 5, 8, 17])
def test_a_row_has_the_same_bits_in_every_block(
    loaded: LoadedModel, native: TextRunner, context_len: int, block: int
) -> None:
    kv, token_ids = random_view(loaded, context_len), list(range(20, 54))
    expected, expected_keys = steps(native, kv, token_ids, block=1)
    logits, keys = steps(native, kv, token_ids, block=block)
    assert torch.equal(logits, expected)
    assert torch.equal(keys, expected_keys)


def test_rows_left_behind_by_speculation_are_not_seen(loaded: LoadedModel, native: TextRunner) -> None:
    kv = random_view(loaded, 300)
    expected, _ = steps(native, kv, [20, 21], block=1)
    for rows in kv.thread:
        rows[:, :, THREAD_LEN + 1 :] = 1e30
    logits, _ = steps(native, kv, [20, 21], block=1)
    assert torch.equal(logits, expected)


def test_sharply_peaked_attention_stays_exact(loaded: LoadedModel, native: TextRunner) -> None:
    """Scores hundreds apart: exponentials that vanish must vanish, not wrap around."""
    kv = random_view(loaded, 700)
    assert kv.context is not None
    kv.context[0].mul_(60)
    expected, _ = steps(TextRunner(loaded, use_native=False), kv, [20, 21, 22], block=3)
    logits, _ = steps(native, kv, [20, 21, 22], block=3)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert torch.isfinite(logits[:, :20].max())


def test_no_room_is_an_error(loaded: LoadedModel, native: TextRunner) -> None:
    kv = random_view(loaded, 10)
    kv.thread_len = kv.capacity
    with pytest.raises(ValueError, match="room for 0 more tokens"):
        native.step(token_ids=[20], positions=text_positions(0, 1), kv=kv)


def test_without_a_compiler_pytorch_is_used(
    loaded: LoadedModel, fresh_build: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    runner = TextRunner(loaded)
    assert runner.kernel_name == "cpu-split"
    assert not runner.is_deterministic


def test_a_cache_that_others_can_write_to_is_not_trusted(
    tmp_path: Path, fresh_build: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "foveate"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.load() is None


def test_a_build_is_kept_for_the_next_process(
    tmp_path: Path, fresh_build: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if build.load() is None:
        pytest.skip("no C compiler here")
    (built,) = (tmp_path / "foveate").iterdir()
    assert built.suffix == ".so"
    modified_ns = built.stat().st_mtime_ns
    build.load.cache_clear()
    assert build.load() is not None
    assert built.stat().st_mtime_ns == modified_ns
