"""Steps over several sequences: every block's bits are those it has alone, whoever stands beside it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import KvView
from engine.batch import Block, Output
from engine.loading import load_model
from engine.runner import TextRunner
from engine.selection import Reduction, ScoreTap
from foveate.checkpoints import default_checkpoint
from tests.kernels import KERNEL_CACHE

NUM_THREADS = 6
CAPACITY = 256
CONTEXT_LENS = (1, 37, 700)


class Bench:
    """A model, three contexts and some threads, with what rows are in them."""

    def __init__(self) -> None:
        self.loaded = load_model(default_checkpoint(), load_vision=False)
        self.runner = TextRunner(self.loaded, kernel_cache=KERNEL_CACHE)
        self._generator = torch.Generator().manual_seed(5)
        self.contexts: list[tuple[Tensor, Tensor] | None] = [None, *(self.rows(length) for length in CONTEXT_LENS)]
        self.threads = [self.rows(CAPACITY) for _ in range(NUM_THREADS)]

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        layout = self.loaded.layout
        shape = (layout.num_layers, layout.num_kv_heads, num_rows, layout.head_dim)
        keys, values = (torch.randn(shape, generator=self._generator) for _ in range(2))
        return keys, values


@pytest.fixture(scope="module")
def bench() -> Bench:
    made = Bench()
    if made.runner.kernel_name != "cpu-native":
        pytest.skip("no C compiler here")
    return made


@st.composite
def blocks(draw: st.DrawFn) -> list[tuple[int, int, list[int], int, int | None, bool]]:
    """Of up to NUM_THREADS sequences: context, thread rows, tokens, rows with logits, tapped layer, query tap."""
    made = []
    for _ in range(draw(st.integers(1, NUM_THREADS))):
        num_rows = draw(st.one_of(st.just(1), st.integers(2, 17), st.integers(18, 80)))
        token_ids = draw(st.lists(st.integers(20, 900), min_size=num_rows, max_size=num_rows))
        made.append(
            (
                draw(st.integers(0, len(CONTEXT_LENS))),
                draw(st.integers(0, CAPACITY - num_rows)),
                token_ids,
                draw(st.integers(0, num_rows)),
                draw(st.one_of(st.none(), st.integers(0, 6))),
                draw(st.booleans()),
            )
        )
    return made


class Queries:
    """A QueryTap that keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_layer(self, layer: int, query: Tensor) -> None:
        assert layer == len(self.seen)
        self.seen.append(query.clone())


def same(one: Output, other: Output) -> bool:
    states = one.states is None and other.states is None
    if one.states is not None and other.states is not None:
        states = torch.equal(one.states, other.states)
    parts = torch.equal(one.hidden, other.hidden) and torch.equal(one.logits, other.logits)
    return states and parts and one.likeliest == other.likeliest


@settings(max_examples=60, deadline=None)
@given(drawn=blocks())
def test_a_block_has_the_same_bits_beside_any_others(
    bench: Bench, drawn: list[tuple[int, int, list[int], int, int | None, bool]]
) -> None:
    asked = [
        Block(
            KvView(bench.contexts[context], bench.threads[index], thread_len),
            token_ids,
            position=thread_len + 9,
            num_chosen=num_chosen,
            states_layer=layer,
            query_tap=Queries() if has_tap else None,
        )
        for index, (context, thread_len, token_ids, num_chosen, layer, has_tap) in enumerate(drawn)
    ]
    alone = []
    for block in asked:
        tap = Queries() if block.query_tap is not None else None
        (output,) = bench.runner.run([replace(block, query_tap=tap)])
        alone.append((output, tap, [rows.clone() for rows in block.kv.thread]))
    for block in asked:
        for rows in block.kv.thread:
            rows[:, :, block.kv.thread_len :] = float("nan")  # what a step writes must not come from the runs before
    together = bench.runner.run(asked)
    for block, output, (expected, tap, thread) in zip(asked, together, alone, strict=True):
        assert same(output, expected)
        end = block.kv.thread_len + block.num_rows
        for rows, before in zip(block.kv.thread, thread, strict=True):
            assert torch.equal(rows[:, :, :end], before[:, :, :end])
            rows[:, :, block.kv.thread_len :] = 0.0
        if isinstance(block.query_tap, Queries) and tap is not None:
            assert all(map(torch.equal, block.query_tap.seen, tap.seen))
            assert len(block.query_tap.seen) == bench.runner.num_layers


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 99), max_size=6), num_rows=st.integers(2, 100))
def test_a_prompt_has_the_same_bits_however_it_is_cut(bench: Bench, cuts: list[int], num_rows: int) -> None:
    embeds = torch.randn(num_rows, bench.runner.hidden_size, generator=torch.Generator().manual_seed(num_rows))
    positions = torch.arange(3 * num_rows).view(3, num_rows) % 50
    whole, pieces = bench.rows(num_rows), bench.rows(num_rows)
    (expected,) = bench.runner.run([Block(KvView(None, whole, 0), embeds=embeds, positions=positions, num_chosen=1)])
    edges = sorted({0, num_rows, *(cut for cut in cuts if cut < num_rows)})
    for start, stop in itertools.pairwise(edges):
        kv = KvView(None, pieces, start)
        block = Block(kv, embeds=embeds[start:stop], positions=positions[:, start:stop], num_chosen=1)
        (output,) = bench.runner.run([block])
    assert torch.equal(output.logits, expected.logits)
    assert all(map(torch.equal, pieces, whole))


def test_where_nothing_can_be_batched_a_step_runs_one_after_the_other(bench: Bench) -> None:
    plain = TextRunner(bench.loaded)
    asked = [
        Block(KvView(bench.contexts[3], thread, 9), [20 + index, 30], 709, num_chosen=index, states_layer=2)
        for index, thread in enumerate(bench.threads[:3])
    ]
    expected = bench.runner.run(asked)
    for output, other in zip(plain.run(asked), expected, strict=True):
        torch.testing.assert_close(output.hidden, other.hidden, atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(output.logits, other.logits, atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(output.states, other.states, atol=2e-4, rtol=1e-5)


def test_more_rows_than_a_pass_takes_run_all_the_same(bench: Bench) -> None:
    assert bench.runner.max_rows is not None
    num_rows = bench.runner.max_rows + 1
    embeds = torch.randn(num_rows, bench.runner.hidden_size)
    thread = bench.rows(num_rows)
    positions = torch.arange(num_rows).expand(3, -1)
    (output,) = bench.runner.run([Block(KvView(None, thread, 0), embeds=embeds, positions=positions, num_chosen=2)])
    assert output.logits.shape[0] == 2


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("first_row", [0, 7, 12])
def test_scores_of_the_kernel_are_those_of_its_queries(bench: Bench, first_row: int, reduction: Reduction) -> None:
    context = bench.contexts[3]
    assert context is not None
    visual = torch.arange(5, 690)

    def scored(runner: TextRunner) -> Tensor:
        kv = KvView(context, bench.threads[0], 20)
        rows = slice(first_row, 13)
        tap = ScoreTap(
            context[0], kv.thread[0], 20, visual_index=visual, rows=rows, scaling=runner.scaling, reduction=reduction
        )
        other = Block(KvView(context, bench.threads[1], 9), [30, 31], 800)
        runner.run([other, Block(kv, list(range(40, 53)), 720, query_tap=tap)])
        return tap.scores

    torch.testing.assert_close(scored(bench.runner), scored(TextRunner(bench.loaded)), atol=1e-5, rtol=1e-3)
