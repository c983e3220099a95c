"""Drafting over the wire beside a real pool: what is accepted, and which rounds are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from drafter_svc.drafter import Drafter
from engine.adjusting import Adjustments
from engine.kv_pool import KvPool
from engine.loading import LoadedModel
from engine.sampling import Sampling
from foveate.rpc.errors import FailedPrecondition, InvalidArgument
from foveate.v1 import drafter_pb2
from tests.unit.drafter_svc.sequence import MAX_TOKENS, Sequence, make_sequence, plain_answer
from tests.unit.drafter_svc.stream import Stream, drafting, refused

if TYPE_CHECKING:
    from foveate.v1.drafter_pb2_grpc import DrafterServiceAsyncStub as Stub


async def answer(stream: Stream, sequence: Sequence, num_tokens: int, *, num: int = 5) -> tuple[list[int], int, int]:
    """The gateway's loop: returns the answer, and how many tokens were drafted and accepted."""
    base_len, token_ids, number, drafted, accepted = sequence.num_prompt_tokens, sequence.tokens[-1:], 0, 0, 0
    out = list(sequence.tokens)
    while len(out) < num_tokens:
        number += 1
        drafts = await stream.round(number, base_len, token_ids, num)
        targets = sequence.verify(base_len, token_ids, drafts)
        matches = [draft == target for draft, target in zip(drafts, targets, strict=False)]
        count = matches.index(False) if False in matches else len(drafts)
        out += targets[: count + 1]
        base_len, token_ids = base_len + len(token_ids) + count, [targets[count]]
        drafted, accepted = drafted + len(drafts), accepted + count
    return out[:num_tokens], drafted, accepted


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=2**63 + 5)])
async def test_a_full_selection_drafts_what_plain_decoding_says(
    stub: Stub, loaded: LoadedModel, pool: KvPool, sampling: Sampling
) -> None:
    expected = plain_answer(loaded, pool, sampling, 30)
    assert len(set(expected)) > 5
    sequence = make_sequence(loaded, pool, sampling=sampling)
    async with drafting(stub, sequence) as stream:
        out, drafted, accepted = await answer(stream, sequence, 30)
    assert out == expected
    assert drafted == accepted > 20


@pytest.mark.parametrize("temperature", [0.0, 0.1])
@pytest.mark.parametrize(
    "asked",
    [
        Adjustments(repetition_penalty=1.4),
        Adjustments(presence_penalty=1.5, frequency_penalty=0.6),
        Adjustments(repetition_penalty=1.2, frequency_penalty=1.0, logit_bias=((20, 6.0), (30, 5.0)), min_tokens=8),
    ],
)
async def test_drafts_are_made_under_the_answers_own_penalties(
    stub: Stub, loaded: LoadedModel, pool: KvPool, asked: Adjustments, temperature: float
) -> None:
    sampling = Sampling(temperature, seed=5, adjustments=asked)
    expected = plain_answer(loaded, pool, sampling, 30)
    assert expected != plain_answer(loaded, pool, Sampling(temperature, seed=5), 30)
    sequence = make_sequence(loaded, pool, sampling=sampling)
    async with drafting(stub, sequence) as stream:
        out, drafted, accepted = await answer(stream, sequence, 30)
    assert out == expected
    assert drafted == accepted > 20


@pytest.mark.parametrize("num_selected", [0, 8])
async def test_a_sparse_view_never_changes_the_answer(
    stub: Stub, loaded: LoadedModel, pool: KvPool, num_selected: int
) -> None:
    expected = plain_answer(loaded, pool, Sampling(), 30)
    sequence = make_sequence(loaded, pool, num_selected=num_selected)
    async with drafting(stub, sequence) as stream:
        out, drafted, accepted = await answer(stream, sequence, 30)
    assert out == expected
    assert accepted < drafted


async def test_committed_rows_come_from_the_verifier(stub: Stub, loaded: LoadedModel, pool: KvPool) -> None:
    # The verifier commits other tokens than were proposed: what follows must be drafted from the verifier's rows.
    sequence = make_sequence(loaded, pool)
    base_len, first = sequence.num_prompt_tokens, sequence.tokens[0]
    async with drafting(stub, sequence) as stream:
        drafts = await stream.round(1, base_len, [first])
        other = [(token_id - 8 + 7) % 250 + 8 for token_id in drafts[:2]]
        sequence.verify(base_len, [first, *other], [])
        expected = [other[1]]
        for index in range(5):
            expected += sequence.verify(base_len + 2 + index, expected[-1:], [])
        # as if the drafts had been accepted by a loose policy: rows up to base_len + 2 are the verifier's
        assert await stream.round(2, base_len + 2, [other[1]]) == expected[1:]


async def test_several_tokens_can_be_committed_at_once(stub: Stub, loaded: LoadedModel, pool: KvPool) -> None:
    expected = plain_answer(loaded, pool, Sampling(), 12)
    sequence = make_sequence(loaded, pool)
    async with drafting(stub, sequence) as stream:
        assert await stream.round(1, sequence.num_prompt_tokens, expected[:3], 4) == expected[3:7]


async def test_a_repeated_round_gets_the_same_reply(stub: Stub, sequence: Sequence) -> None:
    async with drafting(stub, sequence) as stream:
        first = await stream.round(1, sequence.num_prompt_tokens, sequence.tokens)
        assert await stream.round(1, sequence.num_prompt_tokens, sequence.tokens) == first


@pytest.mark.parametrize(
    ("number", "shift", "token_ids"),
    [(1, 1, [9]), (2, 0, [9]), (2, 7, [9]), (3, 1, [9]), (1, 0, [9]), (0, 0, [9]), (2, -50, [9])],
    ids=["changed", "not truncated", "gap", "skipped round", "changed tokens", "round zero", "before the prompt"],
)
async def test_rounds_that_do_not_follow_are_refused(
    stub: Stub, sequence: Sequence, number: int, shift: int, token_ids: list[int]
) -> None:
    base_len = sequence.num_prompt_tokens
    async with drafting(stub, sequence) as stream:
        await stream.round(1, base_len, sequence.tokens)
        asked = drafter_pb2.DraftRound(
            sequence_id="s1", round=number, base_len=base_len + shift, token_ids=token_ids, num_draft_tokens=5
        )
        error = await refused(stream, round=asked)
    assert isinstance(error, FailedPrecondition)
    assert error.reason == "BASE_LEN_MISMATCH"
    assert error.metadata["expected_round"] == "2"


async def test_first_round_starts_at_the_prompt(stub: Stub, sequence: Sequence) -> None:
    async with drafting(stub, sequence) as stream:
        asked = drafter_pb2.DraftRound(
            sequence_id="s1", round=1, base_len=sequence.num_prompt_tokens + 1, token_ids=[9], num_draft_tokens=5
        )
        error = await refused(stream, round=asked)
    assert error.reason == "BASE_LEN_MISMATCH"


async def test_drafts_end_with_the_answer(stub: Stub, sequence: Sequence) -> None:
    base_len = sequence.num_prompt_tokens
    async with drafting(stub, sequence, max_tokens=4) as stream:
        assert len(await stream.round(1, base_len, sequence.tokens, 9)) == 3
    async with drafting(stub, sequence, max_tokens=1) as stream:
        assert await stream.round(1, base_len, sequence.tokens, 9) == []
    async with drafting(stub, sequence, max_tokens=10 * MAX_TOKENS) as stream:
        token_ids = [9] * (sequence.thread.capacity - (base_len - sequence.num_context_tokens) - 2)
        assert len(await stream.round(1, base_len, token_ids, 9)) == 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sequence_id": "other"}, "round.sequence_id"),
        ({"token_ids": []}, "round.token_ids"),
        ({"token_ids": [10**6]}, "round.token_ids"),
        ({"num_draft_tokens": 17}, "round.num_draft_tokens"),
        ({"token_ids": [9] * 500}, "round.base_len"),
    ],
)
async def test_rounds_with_wrong_content_name_the_field(
    stub: Stub, sequence: Sequence, changes: dict[str, Any], field: str
) -> None:
    content = {
        "sequence_id": "s1",
        "round": 1,
        "base_len": sequence.num_prompt_tokens,
        "token_ids": [9],
        "num_draft_tokens": 5,
    }
    async with drafting(stub, sequence) as stream:
        error = await refused(stream, round=drafter_pb2.DraftRound(**(content | changes)))
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == [field]


async def test_order_of_payloads(stub: Stub, sequence: Sequence, drafter: Drafter) -> None:
    error = await refused(Stream(stub.Draft()), round=drafter_pb2.DraftRound())
    assert isinstance(error, InvalidArgument)
    async with drafting(stub, sequence) as stream:
        assert isinstance(await refused(stream, open=sequence.open_message()), InvalidArgument)
    assert isinstance(await refused(Stream(stub.Draft())), InvalidArgument)
    assert drafter.num_sequences == 0
