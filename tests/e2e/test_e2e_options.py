"""Output options on the real stack: drafted answers are those of plain decoding, and drafting still pays. Case S8."""

from __future__ import annotations

import pytest

from foveate.client import AskOptions, Client, Context, DraftMode, FinishReason

QUESTION = "Describe the video."
PENALTIES = AskOptions(
    repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2, min_tokens=40, max_tokens=60
)


@pytest.mark.parametrize("sampling", [AskOptions(), AskOptions(temperature=0.8, seed=11)], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "options",
    [
        AskOptions(repetition_penalty=1.2),
        AskOptions(presence_penalty=0.6, frequency_penalty=0.3),
        AskOptions(logit_bias={100: 3.0, 200: 2.0, 300: -100.0}, max_tokens=40, ignore_eos=True),
        PENALTIES,
    ],
    ids=["repetition", "presence and frequency", "bias", "all"],
)
def test_drafted_equals_plain_and_is_accepted(
    client: Client, context: Context, options: AskOptions, sampling: AskOptions
) -> None:
    asked: AskOptions = {**options, **sampling, "logprobs": True, "top_logprobs": 3}
    plain = client.ask(context, QUESTION, draft=DraftMode.OFF, **asked)
    # The whole budget: what the drafter proposes is then the verifier's choice, if it counts as the verifier does.
    for budget, least in ((1.0, 0.8), (0.05, 0.0)):
        drafted = client.ask(
            context, QUESTION, draft=DraftMode.SPARSE, visual_budget=budget, num_draft_tokens=4, **asked
        )
        assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
        assert drafted.logprobs == plain.logprobs
        assert drafted.stats.num_accepted_tokens >= least * (drafted.stats.num_draft_tokens - 4)
    ngram = client.ask(context, QUESTION, draft=DraftMode.NGRAM, **asked)
    assert (ngram.token_ids, ngram.logprobs) == (plain.token_ids, plain.logprobs)
    assert len(plain.logprobs) == len(plain.token_ids) == plain.num_output_tokens
    assert all(one.logprob < 0 and len(one.top) == 3 for one in plain.logprobs)
    assert plain.token_ids != client.ask(context, QUESTION, max_tokens=60, **sampling).token_ids
    assert plain.num_output_tokens >= options.get("min_tokens", 0)


def test_ignore_eos_gives_answers_of_a_known_length(client: Client, context: Context) -> None:
    ended = client.ask(context, QUESTION, max_tokens=200)
    assert ended.finish_reason is FinishReason.EOS
    going_on = client.ask(context, QUESTION, max_tokens=200, ignore_eos=True)
    assert (going_on.finish_reason, going_on.num_output_tokens) == (FinishReason.LENGTH, 200)
    assert going_on.token_ids[: ended.num_output_tokens] == ended.token_ids


def test_n_answers_are_those_of_single_questions_and_share_the_prefill(client: Client, context: Context) -> None:
    answers = client.ask_n(context, QUESTION, n=4, temperature=1.0, seed=40, max_tokens=48)
    for index, answer in enumerate(answers):
        single = client.ask(context, QUESTION, temperature=1.0, seed=40 + index, max_tokens=48)
        assert (answer.token_ids, answer.text, answer.seed) == (single.token_ids, single.text, 40 + index)
    assert len({answer.token_ids for answer in answers}) > 2
    cached = [answer.num_cached_tokens for answer in answers]
    assert cached[0] == context.num_tokens
    # A fork whose first answer has ended meanwhile is prefilled as ever.
    assert max(cached[1:]) == answers[0].num_prompt_tokens - 1
