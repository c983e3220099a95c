"""Scores against plain softmax attention, and what each method keeps."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine import selection
from engine.attention import KvView
from engine.layout import KvLayout
from engine.loading import LoadedModel
from engine.positions import text_positions
from engine.runner import TextRunner
from engine.selection import Reduction, ScoreTap, SelectionMethod, attention_scores, evenly_spaced, select

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)


@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 25])
def test_scores_are_the_maximum_over_rows_of_the_sum_over_the_group(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(selection, "_BLOCK_BYTES", block_bytes)
    queries, keys, thread = torch.randn(6, 5, 8), torch.randn(2, 40, 8), torch.randn(2, 12, 8)
    scores = attention_scores(queries, keys, thread, 4, torch.arange(3, 30), 0.3)
    everything = torch.cat([keys, thread], dim=1).repeat_interleave(3, 0)
    logits = queries @ everything.transpose(1, 2) * 0.3
    logits = logits.masked_fill(torch.arange(52) > 40 + 4 + torch.arange(5).unsqueeze(1), float("-inf"))
    expected = torch.softmax(logits, dim=-1).view(2, 3, 5, 52).sum(dim=1).amax(dim=1)[:, 3:30]
    torch.testing.assert_close(scores, expected)


def test_attention_keeps_the_largest_in_order_of_position() -> None:
    visual_index = torch.tensor([4, 5, 6, 7, 20, 21])
    scores = torch.zeros(2, 2, 6)
    scores[:, :, [5, 1]] = 1.0
    scores[1, 0, 3] = 2.0
    kept = select(SelectionMethod.ATTENTION, scores, visual_index=visual_index, num_selected=2, layout=LAYOUT)
    assert kept.dtype == torch.int32
    assert kept[0].tolist() == [[5, 21], [5, 21]]
    assert kept[1, 0].tolist() in ([5, 7], [7, 21])
    assert kept[1, 1].tolist() == [5, 21]


def test_random_is_drawn_per_layer_and_head_and_follows_its_generator() -> None:
    visual_index = torch.arange(10, 210)

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return select(
            SelectionMethod.RANDOM,
            None,
            visual_index=visual_index,
            num_selected=20,
            layout=LAYOUT,
            generator=generator,
        )

    kept = draw(1)
    assert torch.equal(kept, draw(1))
    assert not torch.equal(kept, draw(2))
    assert len({tuple(row) for row in kept.view(4, 20).tolist()}) == 4
    assert (kept.diff(dim=-1) > 0).all()
    assert kept.min() >= 10
    assert kept.max() < 210


def test_recent_keeps_sink_and_latest() -> None:
    visual_index = torch.arange(10, 30)
    kept = select(SelectionMethod.RECENT, None, visual_index=visual_index, num_selected=7, layout=LAYOUT)
    assert kept.shape == (2, 2, 7)
    assert kept[1, 1].tolist() == [10, 11, 12, 13, 27, 28, 29]
    few = select(SelectionMethod.RECENT, None, visual_index=visual_index, num_selected=2, layout=LAYOUT)
    assert few[0, 0].tolist() == [10, 11]


@pytest.mark.parametrize("method", list(SelectionMethod))
@pytest.mark.parametrize("num_selected", [0, 12])
def test_nothing_and_everything(method: SelectionMethod, num_selected: int) -> None:
    visual_index = torch.arange(3, 15)
    kept = select(method, torch.rand(2, 2, 12), visual_index=visual_index, num_selected=num_selected, layout=LAYOUT)
    assert torch.equal(kept, visual_index[:num_selected].int().expand(2, 2, -1))


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.\.5"):
        select(SelectionMethod.RECENT, None, visual_index=torch.arange(5), num_selected=6, layout=LAYOUT)
    with pytest.raises(ValueError, match="scores"):
        select(SelectionMethod.ATTENTION, None, visual_index=torch.arange(5), num_selected=2, layout=LAYOUT)


def test_tap_scores_every_layer_and_does_not_change_the_forward(loaded: LoadedModel) -> None:
    layout = loaded.layout
    shape = (layout.num_layers, layout.num_kv_heads, 50, layout.head_dim)
    context = (torch.randn(shape), torch.randn(shape))
    runner = TextRunner(loaded)

    def view() -> KvView:
        thread = torch.zeros(layout.num_layers, layout.num_kv_heads, 10, layout.head_dim)
        return KvView(context, (thread, thread.clone()), 0)

    kv = view()
    visual_index = torch.arange(5, 45)
    tap = ScoreTap(context[0], kv.thread[0], 0, visual_index=visual_index, rows=slice(2, 8), scaling=runner.scaling)
    tapped = runner.forward(token_ids=list(range(20, 30)), positions=text_positions(50, 10), kv=kv, query_tap=tap)
    plain = runner.forward(token_ids=list(range(20, 30)), positions=text_positions(50, 10), kv=view())
    assert torch.equal(tapped, plain)
    assert tap.scores.shape == (layout.num_layers, layout.num_kv_heads, 40)
    assert (tap.scores.sum(dim=-1) > 0).all()
    assert (tap.scores <= 3.0001).all()  # a group of three query heads


def test_sums_over_rows_add_up_over_chunks_of_rows() -> None:
    queries, keys, thread = torch.randn(6, 5, 8), torch.randn(2, 40, 8), torch.randn(2, 12, 8)
    visual = torch.arange(3, 30)

    def total(rows: slice) -> torch.Tensor:
        return attention_scores(queries[:, rows], keys, thread, 4 + rows.start, visual, 0.3, Reduction.SUM)

    each = [attention_scores(queries[:, row : row + 1], keys, thread, 4 + row, visual, 0.3) for row in range(5)]
    torch.testing.assert_close(total(slice(0, 5)), torch.stack(each).sum(0))
    torch.testing.assert_close(Reduction.SUM.merge(total(slice(0, 2)), total(slice(2, 5))), total(slice(0, 5)))


def test_two_stages_keep_the_share_of_attention_and_then_even_spacing() -> None:
    visual_index = torch.arange(10, 30)
    scores = torch.full((2, 2, 20), 0.01)
    scores[:, :, 7] = 1.0
    scores[:, :, 12] = 0.5
    kept = select(SelectionMethod.TWO_STAGE, scores, visual_index=visual_index, num_selected=5, layout=LAYOUT)
    assert (kept == kept[:1, :1]).all()
    chosen = (kept[0, 0] - 10).tolist()
    assert chosen == sorted({7, *chosen})
    # Stage one: entry 7 alone holds 1 / 1.68 of the attention. The rest: 19 entries left, four evenly spaced.
    left = [place for place in range(20) if place != 7]
    assert chosen == sorted([7, *(left[place] for place in evenly_spaced(19, 4).tolist())])
    few = select(SelectionMethod.TWO_STAGE, scores, visual_index=visual_index, num_selected=1, layout=LAYOUT)
    assert few[0, 0].tolist() == [17]
    flat = select(
        SelectionMethod.TWO_STAGE, torch.ones(2, 2, 20), visual_index=visual_index, num_selected=4, layout=LAYOUT
    )
    assert flat[0, 0].tolist() == [10, 11, 12, 13]  # the budget caps stage one
    with pytest.raises(ValueError, match="scores"):
        select(SelectionMethod.TWO_STAGE, None, visual_index=visual_index, num_selected=1, layout=LAYOUT)


@pytest.mark.parametrize(("num_entries", "num_selected"), [(20, 0), (20, 1), (20, 7), (20, 20), (1, 1), (0, 0)])
def test_even_spacing(num_entries: int, num_selected: int) -> None:
    places = evenly_spaced(num_entries, num_selected).tolist()
    assert len(set(places)) == num_selected
    assert places == sorted(places)
    assert all(0 <= place < num_entries for place in places)
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    kept = select(
        SelectionMethod.UNIFORM, None, visual_index=torch.arange(20), num_selected=min(7, num_selected), layout=LAYOUT
    )
    assert kept.shape == (2, 2, min(7, num_selected))
