"""Output options through the real gateway: what is asked of the services, and how it comes back. Case S8."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from foveate.v1 import answers_pb2, sampling_pb2
from tests.fakes import (
    CONTEXT,
    FIRST_LOGPROB,
    PROMPT_TEXT,
    FakeDrafter,
    FakeVerifier,
    ToyModel,
    ask,
    running_stack,
    toy_eos,
    toy_tokenizer,
    until,
)

TEXT = "The red square moves left. The blue circle moves right."
MODEL = ToyModel.of(TEXT)
WARM = sampling_pb2.SamplingParams(temperature=1.0, seed=5)


async def test_services_hear_every_option_of_sampling() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    sampling = sampling_pb2.SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.25, logit_bias={7: 2.5}, min_tokens=3
    )
    async with running_stack(verifier, drafter) as stack:
        await ask(stack, sampling=sampling)
        await ask(stack)
    for heard in (verifier.opens[0].sampling, drafter.opens[0].sampling):
        assert (heard.repetition_penalty, heard.presence_penalty, heard.frequency_penalty) == (1.5, 0.5, -0.25)
        assert (dict(heard.logit_bias), heard.min_tokens) == ({7: 2.5}, 3)
    quiet = verifier.opens[1]
    assert (quiet.sampling.repetition_penalty, dict(quiet.sampling.logit_bias), quiet.fork_of) == (1.0, {}, "")
    assert not quiet.signals.log_probabilities


@pytest.mark.parametrize("agreement", [0.0, 0.7])
async def test_every_token_that_is_sent_has_its_logprobs(agreement: float) -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=agreement)) as stack:
        whole = await ask(stack, logprobs=True, top_logprobs=2)
        cut = await ask(stack, logprobs=True, stop=["blue"])
        none = await ask(stack)
    told = [one for delta in whole.deltas for one in delta.logprobs]
    assert len(told) == len(whole.token_ids)
    assert [one.logprob for one in told] == [FIRST_LOGPROB] + [-0.5] * (len(told) - 1)
    for one in told:
        assert [(top.token_id, top.logprob) for top in one.top] == [(10, -0.5), (11, -1.5)]
        assert [top.text for top in one.top] == [toy_tokenizer().decode([token_id]) for token_id in (10, 11)]
    assert [len(delta.logprobs) for delta in cut.deltas] == [len(delta.token_ids) for delta in cut.deltas]
    assert not any(one.top for delta in cut.deltas for one in delta.logprobs)
    assert not any(delta.logprobs for delta in none.deltas)


async def test_ignore_eos_goes_on_to_the_limit() -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL)) as stack:
        ended = await ask(stack, max_tokens=60)
        going_on = await ask(stack, max_tokens=60, ignore_eos=True)
    assert ended.finished.finish_reason == answers_pb2.FINISH_REASON_EOS
    assert going_on.finished.finish_reason == answers_pb2.FINISH_REASON_LENGTH
    assert len(going_on.token_ids) == 60
    assert toy_eos() in going_on.token_ids
    assert going_on.text.startswith(TEXT)


async def test_each_of_n_answers_comes_whole_under_its_index() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=0.8)
    async with running_stack(verifier, drafter) as stack:
        request = answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT, sampling=WARM, n=3, logprobs=True)
        events = [event async for event in stack.answers.Ask(request)]
        await until(lambda: verifier.streams.num_open == drafter.streams.num_open == 0)
    for index in range(3):
        mine = [event for event in events if event.index == index]
        assert [event.WhichOneof("event") for event in (mine[0], mine[-1])] == ["started", "finished"]
        assert "".join(event.delta.text for event in mine[1:-1]) == TEXT
        assert mine[-1].finished.seed == 5 + index
        assert mine[-1].finished.num_output_tokens == sum(len(event.delta.logprobs) for event in mine)
    assert [opened.sampling.seed for opened in verifier.opens] == [5, 6, 7]
    assert [opened.fork_of for opened in verifier.opens] == ["", "s1", "s1"]
    assert sorted(opened.sampling.seed for opened in drafter.opens) == [5, 6, 7]


async def test_one_of_n_answers_that_fails_ends_the_call() -> None:
    verifier, drafter = FakeVerifier(MODEL), FakeDrafter(MODEL)
    verifier.room = -1
    async with running_stack(verifier, drafter) as stack:
        request = answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT, sampling=WARM, n=2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [event async for event in stack.answers.Ask(request)]
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: verifier.streams.num_open == 0)


async def test_cancelling_n_answers_frees_all_of_them() -> None:
    verifier, drafter = FakeVerifier(ToyModel.of(TEXT, eos=False)), FakeDrafter(MODEL)
    verifier.delay_s = 0.01
    async with running_stack(verifier, drafter) as stack:
        request = answers_pb2.AskRequest(
            context=CONTEXT, question=PROMPT_TEXT, sampling=WARM, n=4, max_tokens=400, ignore_eos=True
        )
        call = stack.answers.Ask(request)
        seen = set()
        async for event in call:
            seen.add(event.index)
            if len(seen) == 4:
                break
        call.cancel()
        assert await until(lambda: verifier.streams.num_open == drafter.streams.num_open == 0) < 1.0


async def test_refusals_name_their_fields() -> None:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL)) as stack:
        request = answers_pb2.AskRequest(
            context=CONTEXT,
            question=PROMPT_TEXT,
            n=2,
            top_logprobs=3,
            sampling=sampling_pb2.SamplingParams(logit_bias={10**6: 1.0}, presence_penalty=3.0),
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [event async for event in stack.answers.Ask(request)]
    assert _violated(caught.value) == {
        "n",
        "top_logprobs",
        "sampling.logit_bias[1000000]",
        "sampling.presence_penalty",
    }


async def test_a_field_that_the_server_does_not_know_is_refused_by_its_number() -> None:
    request = answers_pb2.AskRequest(context=CONTEXT, question=PROMPT_TEXT)
    request.sampling.MergeFromString(bytes([0x98, 0x06, 1]))  # field 99, a number
    request.MergeFromString(bytes([0xA2, 0x06, 1]) + b"x")  # field 100, a string
    request.history.add(text="earlier").MergeFromString(bytes([0x98, 0x06, 1]))
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL)) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [event async for event in stack.answers.Ask(request)]
    assert _violated(caught.value) == {"100", "sampling.99", "history.99"}


def _violated(error: grpc.aio.AioRpcError) -> set[str]:
    bad = error_details_pb2.BadRequest()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert any(detail.Unpack(bad) for detail in rpc_status.from_call(error).details)
    return {violation.field for violation in bad.field_violations}
