"""Output options of the verifier: what is chosen and measured is what plain decoding gives, however it is drafted.

Cases S7 (text equal to plain decoding), S8 (log-probabilities). Here a reference processor of a few lines, on the raw
logits of plain decoding, says what plain decoding is.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from engine.attention import KvView
from engine.handle_proto import selection_from_proto
from engine.positions import text_positions
from engine.sampling import Sampling, choose
from foveate.rpc.errors import InvalidArgument
from foveate.v1 import sampling_pb2, verifier_pb2
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Served, Stream, config_for, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIP = clips.clip(9, fps=4)
QUESTION = "What is that?"
NUM_TOKENS = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {20: 4.0, 31: 3.5, 40: -100.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {20: 5.0, 31: 4.5},
        "min_tokens": 12,
        "top_k": 50,
        "top_p": 0.95,
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(checkpoint: Path) -> AsyncIterator[Served]:
    async with serving(config_for(checkpoint, deterministic=True)) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def context(served: Served) -> str:
    return (await served.prefill(CLIP, fps=4)).name


def asked(options: dict[str, Any], temperature: float) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=temperature, seed=42, **options)


def processed(
    row: torch.Tensor, params: sampling_pb2.SamplingParams, prompt: list[int], answer: list[int], eos: Iterable[int]
) -> torch.Tensor:
    """The reference: one row of raw logits after bias, least length and penalties, in plain Python."""
    values = row.tolist()
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id in eos if len(answer) < params.min_tokens else ():
        values[token_id] = float("-inf")
    if params.HasField("repetition_penalty"):
        for token_id in {*prompt, *answer}:
            value = values[token_id]
            values[token_id] = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
    for token_id, count in Counter(answer).items():
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return torch.tensor([values])


async def reference(served: Served, stream: Stream, params: sampling_pb2.SamplingParams, num_tokens: int) -> list[int]:
    """Plain decoding by the engine alone, a token at a time, each chosen from processed logits."""
    parts = served.verifier.parts
    (held,) = served.verifier.contexts.newest_first()
    facts, opened = held.facts, stream.opened
    prompt = list(opened.prompt_token_ids)
    sampling = Sampling(params.temperature, params.top_k, params.top_p or 1.0, params.seed)

    def decode() -> list[int]:
        keys, values = parts.pool.views(held.slab)
        thread = torch.zeros(*keys.shape[:2], 256, keys.shape[3]), torch.zeros(*values.shape[:2], 256, values.shape[3])
        answer: list[int] = []
        row, fed = 0, prompt
        while len(answer) < num_tokens:
            positions = text_positions(facts.num_tokens + row + facts.position_delta, len(fed))
            hidden = parts.runner.forward(token_ids=fed, positions=positions, kv=KvView((keys, values), thread, row))
            whole = parts.context_token_ids(facts.grid, facts.video.frame_timestamps_s) + prompt
            logits = processed(parts.runner.logits(hidden[-1:])[0], params, whole, answer, parts.loaded.eos_token_ids)
            row += len(fed)
            fed = choose(logits, facts.num_tokens + row, sampling)
            answer += fed
        return answer

    return await served.verifier.device.run(decode)


def drafters(plain: list[int]) -> list[Any]:
    """Drafts of several kinds: right, wrong, and right for some places."""
    chance = random.Random(4)

    def partly(token_ids: list[int]) -> list[int]:
        right = plain[len(token_ids) : len(token_ids) + 5]
        return [token_id if chance.random() < 0.7 else chance.randrange(8, 250) for token_id in right]

    return [
        lambda token_ids: plain[len(token_ids) : len(token_ids) + 7],
        lambda token_ids: [chance.randrange(8, 250) for _ in range(4)],
        partly,
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
async def test_drafted_tokens_are_those_of_the_reference(
    served: Served, context: str, options: dict[str, Any], temperature: float
) -> None:
    params = asked(options, temperature)
    async with served.answering(context, QUESTION, sampling=params) as stream:
        plain = await stream.plain(NUM_TOKENS)
        expected = await reference(served, stream, params, NUM_TOKENS)
    assert plain == expected
    async with served.answering(context, QUESTION, sampling=asked({}, temperature)) as stream:
        assert await stream.plain(NUM_TOKENS) != plain  # the option matters
    for drafter in drafters(plain):
        async with served.answering(context, QUESTION, sampling=params) as stream:
            assert await stream.drafted(NUM_TOKENS, drafter) == plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_an_answer_goes_on_under_its_penalties(served: Served, context: str, temperature: float) -> None:
    params = asked(OPTIONS["all"], temperature)
    async with served.answering(context, QUESTION, sampling=params) as stream:
        plain = await stream.plain(NUM_TOKENS)
    async with served.answering(context, QUESTION, sampling=params, answer_token_ids=plain[:9]) as stream:
        assert await stream.plain(NUM_TOKENS - 9) == plain[9:]


async def test_no_end_is_chosen_before_min_tokens(served: Served, context: str) -> None:
    (eos, *_) = served.verifier.parts.loaded.eos_token_ids
    eager = {"logit_bias": {eos: 100.0}}
    async with served.answering(context, QUESTION, sampling=asked(eager, 0.0)) as stream:
        assert stream.opened.first_token_id == eos
    params = asked({**eager, "min_tokens": 6}, 0.0)
    async with served.answering(context, QUESTION, sampling=params) as stream:
        plain = await stream.plain(7)
    assert eos not in plain[:6]
    assert plain[6] == eos
    async with served.answering(context, QUESTION, sampling=params) as stream:
        assert await stream.drafted(7, lambda token_ids: [*plain[len(token_ids) : 6], eos, eos]) == plain


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "all"])
async def test_log_probabilities_are_bit_for_bit_those_of_plain_decoding(
    served: Served, context: str, options: dict[str, Any]
) -> None:
    signals = verifier_pb2.Signals(log_probabilities=True, num_top_log_probabilities=4)
    fields = {"sampling": asked(options, 0.8), "signals": signals}

    def told(verified: verifier_pb2.RoundVerified, place: int) -> tuple[Any, ...]:
        top = verified.top[place]
        return verified.target_log_probabilities[place], tuple(top.token_ids), tuple(top.log_probabilities)

    async with served.answering(context, QUESTION, **fields) as stream:
        opened, tokens = stream.opened, [stream.opened.first_token_id]
        plain = []
        for number in range(1, 13):
            verified = await stream.repeat(number, opened.num_prompt_tokens + number - 1, tokens[-1:])
            tokens.append(verified.target_token_ids[0])
            plain.append(told(verified, 0))
    async with served.answering(context, QUESTION, **fields) as stream:
        verified = await stream.repeat(1, opened.num_prompt_tokens, tokens[:1], tokens[1:12])
        assert list(verified.target_token_ids) == tokens[1:13]
        assert [told(verified, place) for place in range(12)] == plain
        # The draft's own are those of its tokens, the target's here.
        assert list(verified.draft_log_probabilities) == [one[0] for one in plain[:11]]
    assert len({one[0] for one in plain}) > 6
    for logprob, token_ids, logprobs in plain:
        assert len(set(token_ids)) == 4
        assert list(logprobs) == sorted(logprobs, reverse=True)
        assert logprob <= logprobs[0] < 0.0
    first = dict(zip(opened.first_top.token_ids, opened.first_top.log_probabilities, strict=True))
    assert len(first) == 4
    assert opened.first_log_probability == first.get(opened.first_token_id, opened.first_log_probability)
    assert opened.first_log_probability <= max(first.values()) < 0.0


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias[1000000]"),
        ({"logit_bias": {9: 101.0}}, "logit_bias[9]"),
    ],
)
async def test_what_no_answer_can_have_is_refused_by_name(
    served: Served, context: str, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        async with served.answering(context, QUESTION, sampling=asked(params, 0.0)):
            pass
    assert [violation.field for violation in caught.value.violations] == [f"open.sampling.{field}"]


@pytest.mark.parametrize("num_questions", [12, pytest.param(200, marks=pytest.mark.slow)])
async def test_greedy_text_is_that_of_plain_decoding_over_many_questions(
    served: Served, context: str, num_questions: int
) -> None:
    chance = random.Random(num_questions)
    for number in range(num_questions):
        question = f"Question {number}: {chance.choice(('what', 'where', 'when'))} is {chance.randrange(10**6)}?"
        async with served.answering(context, question) as stream:
            plain = await stream.plain(16)
        for drafter in drafters(plain)[:2]:  # the target itself, and random tokens
            async with served.answering(context, question) as stream:
                assert await stream.drafted(16, drafter) == plain


async def test_a_fork_computes_one_token_and_answers_as_it_would_alone(served: Served, context: str) -> None:
    def sampling(seed: int) -> sampling_pb2.SamplingParams:
        return sampling_pb2.SamplingParams(temperature=0.8, seed=seed, repetition_penalty=1.2)

    fields = {"visual_budget": 0.5}
    async with served.answering(context, QUESTION, sampling=sampling(8), **fields) as stream:
        alone = await stream.plain(NUM_TOKENS)
        alone_selection = await _selection(served, stream)
        assert stream.opened.num_reused_tokens == 0
    async with served.answering(context, QUESTION, sampling=sampling(7), **fields) as origin:
        before = await origin.plain(6)
        fork_of = origin.opened.sequence_id
        async with served.answering(context, QUESTION, sampling=sampling(8), fork_of=fork_of, **fields) as fork:
            assert fork.opened.num_reused_tokens == len(fork.opened.prompt_token_ids) - 1
            assert await _selection(served, fork) == alone_selection
            assert await fork.plain(NUM_TOKENS) == alone
        base_len = origin.opened.num_prompt_tokens + 5
        rest = await origin.round(base_len, before[-1:])
        # Another question, another selection or a sequence that is not open: prefilled as ever.
        for changes in ({"question": "Why?"}, {"visual_budget": 0.25}, {"fork_of": "gone"}):
            asked_for = {"question": QUESTION, "fork_of": fork_of, **fields, **changes}
            async with served.answering(context, sampling=sampling(8), **asked_for) as other:
                assert other.opened.num_reused_tokens == 0
    async with served.answering(context, QUESTION, sampling=sampling(7)) as stream:
        assert await stream.plain(7) == [*before, *rest]


async def _selection(served: Served, stream: Stream) -> list[Any]:
    slab = selection_from_proto(stream.opened.selection)
    return await served.verifier.device.run(lambda: served.verifier.parts.pool.selection_view(slab).tolist())
