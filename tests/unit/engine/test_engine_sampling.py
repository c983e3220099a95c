"""Shared noise: its law (case S5), its reproducibility, and that blocks do not matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.sampling import Sampling, choose, gumbel_noise, transformed, uniform
from gateway.policies.base import Memory
from gateway.policies.exact import ExactPolicy
from gateway.values import Draft, Verified

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5])
NUM_DRAWS = 20_000
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27}  # by degrees of freedom


def target(logits: Tensor, sampling: Sampling) -> Tensor:
    scaled, token_ids = transformed(logits[None], sampling)
    probabilities = torch.zeros(logits.shape[-1], dtype=torch.float64)
    probabilities[token_ids[0]] = torch.softmax(scaled[0], dim=-1)
    return probabilities


def assert_law(counts: Tensor, probabilities: Tensor) -> None:
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    assert statistic < CHI_SQUARE_999[int(possible.sum()) - 1]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.7, 1.0, 0), (1.0, 1.0, 0), (2.0, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 2)]
)
def test_first_and_second_token_follow_the_target(temperature: float, top_p: float, top_k: int) -> None:
    after = torch.stack([LOGITS.roll(shift) for shift in range(4)])  # the second token's logits depend on the first
    sampling = Sampling(temperature, top_k, top_p, seed=11)
    every = torch.tensor(choose(LOGITS.expand(2 * NUM_DRAWS, -1), 0, sampling))
    first = every[0::2]  # draws at even indices; each is followed by one at the odd index after it
    second_choices = torch.stack([torch.tensor(choose(row.expand(2 * NUM_DRAWS, -1), 0, sampling)) for row in after])
    second = second_choices[first, torch.arange(1, 2 * NUM_DRAWS, 2)]
    counts = torch.zeros(4, 4, dtype=torch.int64).index_put_((first, second), torch.tensor(1), accumulate=True)
    assert_law(counts.sum(dim=1), target(LOGITS, sampling))
    for token_id in range(4):
        if counts[token_id].sum():
            assert_law(counts[token_id], target(after[token_id], sampling))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_a_greedy_drafter_does_not_bend_the_law(temperature: float) -> None:
    after = torch.stack([LOGITS.roll(shift) for shift in range(4)])
    drafted = int(LOGITS.argmax())
    first, second = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    for seed in range(2000):
        sampling = Sampling(temperature, seed=seed)
        targets = tuple(choose(torch.stack([LOGITS, after[drafted]]), 5, sampling))
        committed = [token.id for token in ExactPolicy().decide(Draft((drafted,)), Verified(targets), Memory()).tokens]
        if len(committed) == 1:  # rejected: the next round chooses after the recovered token
            committed += choose(after[committed[0]][None], 6, sampling)
        first[committed[0]] += 1
        second[committed[0], committed[1]] += 1
    assert_law(first, target(LOGITS, Sampling(temperature)))
    for token_id in range(4):
        assert_law(second[token_id], target(after[token_id], Sampling(temperature)))


def test_the_law_holds_over_seeds_too() -> None:
    counts = torch.zeros(4, dtype=torch.int64)
    for seed in range(2000):
        counts[choose(LOGITS[None], 17, Sampling(1.0, seed=seed))[0]] += 1
    assert_law(counts, target(LOGITS, Sampling(1.0)))


def test_blocks_do_not_matter() -> None:
    logits = torch.randn(12, 300, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=42)
    whole = choose(logits, 100, sampling)
    for block in (1, 5):
        parts = [choose(logits[at : at + block], 100 + at, sampling) for at in range(0, 12, block)]
        assert [token_id for part in parts for token_id in part] == whole
    assert choose(logits, 101, sampling) != whole


def test_seeds_differ_and_repeat() -> None:
    logits = torch.zeros(64, 100)
    draws = {seed: tuple(choose(logits, 0, Sampling(1.0, seed=seed))) for seed in (0, 1, 2**32, 2**64 - 1)}
    assert len(set(draws.values())) == len(draws)
    for seed, draw in draws.items():
        assert tuple(choose(logits, 0, Sampling(1.0, seed=seed))) == draw
        assert len(set(draw)) > 30


def test_noise_is_uniform_over_tokens_indices_and_seeds() -> None:
    token_ids = torch.arange(50_000)
    for values in (
        uniform(1, [1], token_ids),
        uniform(1, range(1000), token_ids[:50]).flatten(),
        torch.cat([uniform(seed, [1], token_ids[:50]) for seed in range(1000)]).flatten(),
    ):
        assert values.min() > 0.0
        assert values.max() < 1.0
        counts = torch.histc(values.float(), bins=20, min=0, max=1)
        statistic = ((counts - values.numel() / 20) ** 2 / (values.numel() / 20)).sum()
        assert statistic < 43.8  # 99.9 % of chi-square with 19 degrees of freedom


def test_neighbouring_keys_are_not_correlated() -> None:
    token_ids = torch.arange(20_000)
    base, after = uniform(5, [9, 10], token_ids)
    for other in (after, uniform(6, [9], token_ids)[0], uniform(6, [8], token_ids)[0], base.roll(1)):
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1]
        assert abs(correlation) < 0.03


def test_noise_is_fixed_for_ever() -> None:
    # Drafters and verifiers of different builds must agree: changing these numbers is a change of protocol.
    def reference(seed: int, index: int, token_id: int) -> float:
        def mix(value: int) -> int:
            value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
            return value ^ (value >> 31)

        gamma = 0x9E3779B97F4A7C15
        start = mix((mix((seed + gamma) % 2**64) + index + gamma) % 2**64)
        return ((mix((start + token_id * gamma) % 2**64) >> 12) + 0.5) / 2**52

    token_ids = torch.tensor([0, 1, 151_935])
    for seed in (0, 42, 2**63, 2**64 - 1):
        expected = [[reference(seed, index, token_id) for token_id in token_ids.tolist()] for index in (0, 1000)]
        assert uniform(seed, [0, 1000], token_ids).tolist() == expected
    assert f"{reference(42, 1000, 1):.12f}" == "0.717616778471"
    assert torch.isfinite(gumbel_noise(42, [1000], torch.arange(200_000))).all()


def test_greedy_is_argmax_whatever_the_seed() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    assert choose(logits, 3, Sampling(seed=7)) == logits.argmax(-1).tolist()


def test_masked_and_cut_tokens_never_win() -> None:
    logits = torch.tensor([[1.0, float("-inf"), 0.9, 0.8, -5.0]])
    for seed in range(300):
        assert choose(logits, 0, Sampling(5.0, seed=seed))[0] != 1
        assert choose(logits, 0, Sampling(5.0, top_k=2, seed=seed))[0] in (0, 2)
        assert choose(logits, 0, Sampling(1.0, top_p=0.3, seed=seed)) == [0]


def test_truncation_keeps_the_smallest_sufficient_set_and_breaks_ties_by_id() -> None:
    def kept(logits: Tensor, sampling: Sampling) -> list[int]:
        scaled, token_ids = transformed(logits[None], sampling)
        return [int(token_id) for token_id in token_ids[torch.isfinite(scaled)].tolist()]

    tied = torch.tensor([1.0, 2.0, 2.0, 1.0])
    assert kept(tied, Sampling(1.0, top_k=1)) == [1]
    assert kept(tied, Sampling(1.0, top_k=3)) == [1, 2, 0]
    quarter = torch.zeros(4)
    assert kept(quarter, Sampling(1.0, top_p=0.5)) == [0, 1]
    assert kept(quarter, Sampling(1.0, top_p=0.51)) == [0, 1, 2]
    assert kept(quarter, Sampling(1.0, top_p=1e-9)) == [0]
