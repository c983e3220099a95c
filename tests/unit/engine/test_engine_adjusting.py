"""Bias, least length and penalties against transformers' processors and the definitions of presence and frequency."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from engine.adjusting import Adjuster, Adjustments
from engine.sampling import Sampling, choose

VOCAB, EOS = 40, (3, 17)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
ASKED = st.builds(
    Adjustments,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0])).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 6),
)


def reference(asked: Adjustments, logits: torch.Tensor, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """One row [vocab], as a plain decoder would have it after `answer`."""
    row = logits.clone()
    for token_id, bias in asked.logit_bias:
        row[token_id] += bias
    processors = LogitsProcessorList(
        [
            MinLengthLogitsProcessor(len(prompt) + asked.min_tokens, list(EOS), device="cpu"),
            RepetitionPenaltyLogitsProcessor(asked.repetition_penalty),
        ]
    )
    row = processors(torch.tensor([[*prompt, *answer]], dtype=torch.long), row.unsqueeze(0))[0]
    for token_id in set(answer):
        row[token_id] -= asked.frequency_penalty * answer.count(token_id)
        row[token_id] -= asked.presence_penalty
    return row


@settings(max_examples=60, deadline=None)
@given(
    ASKED,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    IDS,
    st.lists(st.integers(0, VOCAB - 1), max_size=5),
    st.integers(0, 99),
)
def test_every_row_is_that_of_plain_decoding(
    asked: Adjustments, prompt: list[int], answer: list[int], drafts: list[int], seed: int
) -> None:
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, 5] = float("-inf")  # a token that is never chosen
    kept = logits.clone()
    adjuster = Adjuster(asked, prompt_token_ids=prompt, eos_token_ids=EOS)
    block = adjuster.adjusted(logits, answer, drafts)
    assert torch.equal(logits, kept)
    for row in range(len(drafts) + 1):
        before = [*answer, *drafts[:row]]
        torch.testing.assert_close(block[row], reference(asked, logits[row], prompt, before), rtol=1e-6, atol=1e-6)
        # Bit for bit what the row alone gives: blocks of any size choose alike.
        alone = adjuster.adjusted(logits[row : row + 1], before)
        assert torch.equal(alone[0], block[row])
        assert choose(alone, 9, Sampling(0.8, seed=3)) == choose(block[row : row + 1], 9, Sampling(0.8, seed=3))


def test_the_prompt_counts_for_repetition_only() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    prompt = (0, 1)
    other = Adjuster(
        Adjustments(presence_penalty=1.0, frequency_penalty=1.0), prompt_token_ids=prompt, eos_token_ids=()
    )
    assert torch.equal(other.adjusted(logits, ()), logits)
    assert other.adjusted(logits, (2, 2)).tolist() == [[2.0, -2.0, -2.0]]
    repetition = Adjuster(Adjustments(repetition_penalty=2.0), prompt_token_ids=prompt, eos_token_ids=())
    assert repetition.adjusted(logits, ()).tolist() == [[1.0, -4.0, 1.0]]


def test_the_end_is_possible_again_after_min_tokens() -> None:
    adjuster = Adjuster(Adjustments(min_tokens=3), prompt_token_ids=(), eos_token_ids=EOS)
    block = adjuster.adjusted(torch.zeros(4, VOCAB), (8,), (9, 9, 9))
    assert [row[3].item() == float("-inf") for row in block] == [True, True, False, False]
