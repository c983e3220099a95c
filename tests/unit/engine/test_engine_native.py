"""The compiled step: against PyTorch's kernels, bit by bit against itself, and where it cannot be built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention import KvView
from engine.batch import Block
from engine.loading import LoadedModel, load_model
from engine.native import build
from engine.native.decoder import MAX_ROWS
from engine.runner import TextRunner
from engine.sampling import Sampling, choose
from foveate.checkpoints import default_checkpoint
from tests.kernels import KERNEL_CACHE
from tests.unit.engine.tiny_model import write_tiny_checkpoint

THREAD_LEN = 70  # more than two blocks of keys, and not whole ones


SHAPES = {  # query heads that share keys and values: 2 and 1, 2, 7
    "embedded": None,
    "qwen2_vl, group 1, head_dim 128": {"model_type": "qwen2_vl", "head_dim": 128, "num_heads": 2, "num_kv_heads": 2},
    "group 2, head_dim 32": {"head_dim": 32, "num_heads": 4, "num_kv_heads": 2},
    "llava_onevision": {"model_type": "llava_onevision", "head_dim": 32, "num_heads": 4, "num_kv_heads": 2},
    "qwen3_vl": {"model_type": "qwen3_vl", "head_dim": 32, "num_heads": 4, "num_kv_heads": 2},
    "group 7, head_dim 64": {"head_dim": 64, "num_heads": 7, "num_kv_heads": 1},
}


@pytest.fixture(scope="module", params=SHAPES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    shape = SHAPES[request.param]
    folder = default_checkpoint() if shape is None else write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **shape)
    return load_model(folder, load_vision=False)


@pytest.fixture(scope="module")
def native(loaded: LoadedModel) -> TextRunner:
    runner = TextRunner(loaded, kernel_cache=KERNEL_CACHE)
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
        position = kv.context_len + kv.thread_len
        logits.append(runner.logits(runner.step(token_ids=part, position=position, kv=kv)))
        kv.thread_len += len(part)
    return torch.cat(logits), kv.thread[0].clone()


@pytest.mark.parametrize("context_len", [0, 1, 64, 3000])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 17])
def test_a_step_computes_what_pytorch_does(
    loaded: LoadedModel, native: TextRunner, context_len: int, num_rows: int
) -> None:
    plain = TextRunner(loaded)
    kv, token_ids = random_view(loaded, context_len), list(range(20, 20 + num_rows))
    expected, expected_keys = steps(plain, kv, token_ids, block=num_rows)
    logits, keys = steps(native, kv, token_ids, block=num_rows)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(keys, expected_keys, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("context_len", [0, 63, 64, 65, 2049])
def test_a_row_has_the_same_bits_in_every_block(loaded: LoadedModel, native: TextRunner, context_len: int) -> None:
    kv, token_ids = random_view(loaded, context_len), list(range(20, 54))
    expected, expected_keys = steps(native, kv, token_ids, block=1)
    for block in range(2, 18):
        logits, keys = steps(native, kv, token_ids, block=block)
        assert torch.equal(logits, expected), block
        assert torch.equal(keys, expected_keys), block


@pytest.mark.parametrize("position", [505, 511, 512, 100_000])
def test_positions_on_and_across_pages_of_angles(loaded: LoadedModel, native: TextRunner, position: int) -> None:
    plain, token_ids = TextRunner(loaded), list(range(20, 37))
    kv = random_view(loaded, 100)
    expected = plain.step(token_ids=token_ids, position=position, kv=kv)
    hidden = native.step(token_ids=token_ids, position=position, kv=kv)
    torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=1e-5)
    alone = []
    for token_id in token_ids:
        alone.append(native.step(token_ids=[token_id], position=position + len(alone), kv=kv))
        kv.thread_len += 1
    assert torch.equal(hidden, torch.cat(alone))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5)])
@pytest.mark.parametrize("token_ids", [[20], [21, 22, 23]])
def test_the_next_token_is_the_choice_after_a_step(
    loaded: LoadedModel, native: TextRunner, sampling: Sampling, token_ids: list[int]
) -> None:
    kv = random_view(loaded, 333)
    expected = choose(native.logits(native.step(token_ids=token_ids, position=9, kv=kv)[-1:]), 12, sampling)
    kv.thread[0][:, :, THREAD_LEN:] = 0
    (output,) = native.run([Block(kv, token_ids, 9, num_chosen=1)])
    assert output.choose(12, sampling) == expected


def test_hidden_states_on_the_way_are_those_of_pytorch(loaded: LoadedModel, native: TextRunner) -> None:
    plain, kv = TextRunner(loaded), random_view(loaded, 200)
    for layer in range(native.num_layers + 1):
        block = Block(kv, [20, 21, 22], 300, states_layer=layer)
        (expected,), (output,) = plain.run([block]), native.run([block])
        assert output.states is not None
        assert expected.states is not None
        torch.testing.assert_close(output.hidden, expected.hidden, atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(output.states, expected.states, atol=2e-4, rtol=1e-5)
        assert torch.equal(output.hidden, native.step(token_ids=[20, 21, 22], position=300, kv=kv))


def test_of_equal_tokens_the_lowest_that_is_one_is_next(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_checkpoint(tmp_path / "tiny", head_dim=32), load_vision=False)
    loaded.family.lm_head(loaded.model).weight.zero_()  # tied: embeddings too, so that all logits are 0
    runner, kv = TextRunner(loaded, kernel_cache=KERNEL_CACHE), random_view(loaded, 0)
    logits = runner.logits(runner.step(token_ids=[20], position=0, kv=kv))
    assert set(logits.unique().tolist()) == {0.0, float("-inf")}
    assert set(logits[0].isneginf().nonzero()[:, 0].tolist()) >= set(loaded.family.placeholder_token_ids)
    (output,) = runner.run([Block(kv, [20], 0, num_chosen=1)])
    (chosen,) = output.choose(1, Sampling())
    assert chosen == choose(logits, 1, Sampling())[0] == int((logits[0] == 0.0).nonzero()[0])


@pytest.mark.parametrize("token_id", [-1, 1 << 30])
def test_an_id_without_an_embedding_is_an_error(loaded: LoadedModel, native: TextRunner, token_id: int) -> None:
    with pytest.raises(IndexError, match="token ids must be below"):
        native.step(token_ids=[20, token_id], position=0, kv=random_view(loaded, 10))


def test_rows_left_behind_by_speculation_are_not_seen(loaded: LoadedModel, native: TextRunner) -> None:
    kv = random_view(loaded, 300)
    expected, _ = steps(native, kv, [20, 21], block=1)
    for rows in kv.thread:
        rows[:, :, THREAD_LEN + 1 :] = float("nan")
    logits, _ = steps(native, kv, [20, 21], block=1)
    assert torch.equal(logits, expected)


def test_sharply_peaked_attention_stays_exact(loaded: LoadedModel, native: TextRunner) -> None:
    """Scores hundreds apart: exponentials that vanish must vanish, not wrap around."""
    kv = random_view(loaded, 700)
    assert kv.context is not None
    kv.context[0].mul_(60)
    expected, _ = steps(TextRunner(loaded), kv, [20, 21, 22], block=3)
    logits, _ = steps(native, kv, [20, 21, 22], block=3)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert torch.isfinite(logits[:, :20].max())


def test_no_room_is_an_error(loaded: LoadedModel, native: TextRunner) -> None:
    kv = random_view(loaded, 10)
    kv.thread_len = kv.capacity
    with pytest.raises(ValueError, match="room for 0 more tokens"):
        native.step(token_ids=[20], position=0, kv=kv)


def test_without_a_compiler_pytorch_is_used(
    loaded: LoadedModel, fresh_build: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    runner = TextRunner(loaded, kernel_cache=Path("never-made"))
    assert runner.kernel_name == "cpu-split"
    assert not runner.is_deterministic


def test_a_cache_that_others_can_write_to_is_not_trusted(tmp_path: Path, fresh_build: None) -> None:
    tmp_path.chmod(0o777)
    assert build.load(tmp_path) is None


def test_a_build_is_kept_for_the_next_process(tmp_path: Path, fresh_build: None) -> None:
    folder = tmp_path / "made" / "here"
    if build.load(folder) is None:
        pytest.skip("no C compiler here")
    (built,) = folder.iterdir()
    assert built.suffix == ".so"
    modified_ns = built.stat().st_mtime_ns
    build.load.cache_clear()
    assert build.load(folder) is not None
    assert built.stat().st_mtime_ns == modified_ns


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/caches", "HOME": "/me"}, Path("/caches/foveate")),
        ({"XDG_CACHE_HOME": "", "HOME": "/me"}, Path("/me/.cache/foveate")),
        ({}, None),
    ],
)
def test_the_cache_is_where_the_environment_says(environment: dict[str, str], folder: Path | None) -> None:
    assert build.user_cache(environment) == folder
