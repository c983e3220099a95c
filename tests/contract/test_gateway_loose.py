"""Answers under loose policies, through the real gateway: what is promised, counted, explained and refused."""

from __future__ import annotations

import grpc
import pytest

from foveate.rpc.errors import InvalidArgument, from_rpc_error
from foveate.v1 import answers_pb2
from gateway.config import GatewayConfig
from gateway.values import AcceptancePolicy
from tests.fakes import Answer, FakeDrafter, FakeVerifier, ToyModel, ask, running_stack

TEXT = "The red square moves left and then the blue circle moves right."
MODEL = ToyModel.of(TEXT)
LOOSE = (answers_pb2.TOKEN_ORIGIN_LOOSE, answers_pb2.TOKEN_ORIGIN_SALVAGED)


def acceptance(policy: str, lam: float | None = None, **fields: object) -> answers_pb2.Acceptance:
    message = answers_pb2.Acceptance(policy=answers_pb2.AcceptancePolicy.Value(f"ACCEPTANCE_POLICY_{policy}"), **fields)  # type: ignore[arg-type]
    if lam is not None:
        setattr(message, "lambda", lam)
    return message


async def answer_with(asked: answers_pb2.Acceptance | None, *, agreement: float = 0.6, explain: bool = False) -> Answer:
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=agreement)) as stack:
        return await ask(stack, acceptance=asked, explain=explain, max_tokens=40)


async def test_lambda_0_is_lossless_and_equal_to_exact() -> None:
    exact = await answer_with(None)
    for policy in ("LVSPEC", "RANDOM"):
        answer = await answer_with(acceptance(policy, 0.0))
        assert answer.token_ids == exact.token_ids
        assert answer.finished.guarantee == answers_pb2.GUARANTEE_LOSSLESS
        assert answer.finished.stats.num_accepted_tokens_per_pos == exact.finished.stats.num_accepted_tokens_per_pos
    assert exact.finished.policy == answers_pb2.ACCEPTANCE_POLICY_EXACT


async def test_a_loose_answer_says_so_with_counts_and_positions() -> None:
    answer = await answer_with(acceptance("LVSPEC", 0.7, window=2), explain=True)
    finished, stats = answer.finished, answer.finished.stats
    assert finished.guarantee == answers_pb2.GUARANTEE_LOOSE
    assert finished.policy == answers_pb2.ACCEPTANCE_POLICY_LVSPEC
    origins = [origin for delta in answer.deltas for origin in delta.origins]
    positions = [place for place, origin in enumerate(origins) if origin in LOOSE]
    assert list(finished.loose_positions) == positions
    assert stats.num_loose_tokens == len(positions) > 0
    assert stats.num_salvaged_tokens == origins.count(answers_pb2.TOKEN_ORIGIN_SALVAGED)
    assert stats.num_loose_tokens <= stats.num_accepted_tokens <= stats.num_draft_tokens
    silent = await answer_with(acceptance("LVSPEC", 0.7, window=2))
    assert silent.token_ids == answer.token_ids
    assert not silent.finished.loose_positions
    assert not any(delta.details for delta in silent.deltas)


async def test_details_tell_what_the_policy_knew() -> None:
    answer = await answer_with(acceptance("LVSPEC", 0.7), explain=True)
    details = [detail for delta in answer.deltas for detail in delta.details]
    origins = [origin for delta in answer.deltas for origin in delta.origins]
    assert len(details) == len(origins) == len(answer.token_ids)
    first, *others = details
    assert (first.round, first.HasField("relevance"), first.HasField("entropy")) == (0, False, False)
    assert [detail.round for detail in details] == sorted(detail.round for detail in details)
    for detail, origin in zip(others, origins[1:], strict=True):
        assert detail.HasField("relevance")
        assert detail.HasField("entropy")
        assert detail.log_probability == (-2.0 if origin in LOOSE else -0.5)
        assert detail.HasField("target_token_id") == (origin in LOOSE)
        assert bool(detail.target_text) == (origin in LOOSE)
        assert detail.HasField("draft_token_id") == (origin == answers_pb2.TOKEN_ORIGIN_RECOVERED)


async def test_policies_that_keep_everything_take_the_fewest_rounds() -> None:
    off = {"guard_special": False, "guard_numbers": False, "guard_negations": False}
    everything = await answer_with(acceptance("LVSPEC", 1.0, **off), agreement=0.0)
    stats = everything.finished.stats
    assert stats.num_draft_rounds * 5 >= stats.num_accepted_tokens > (stats.num_draft_rounds - 1) * 5
    gate = await answer_with(acceptance("FLY_GATE", entropy_threshold=0.5), agreement=0.5)
    assert gate.finished.stats.num_loose_tokens > 0
    fly = await answer_with(acceptance("FLY", window=2), agreement=0.8)
    assert fly.finished.policy == answers_pb2.ACCEPTANCE_POLICY_FLY


async def test_the_verifier_measures_only_what_is_needed() -> None:
    verifier = FakeVerifier(MODEL)
    async with running_stack(verifier, FakeDrafter(MODEL)) as stack:
        await ask(stack)
        await ask(stack, acceptance=acceptance("LVSPEC", num_nearest=3))
        await ask(stack, acceptance=acceptance("FLY", min_probability=0.25))
        await ask(stack, explain=True)
    asked = [opened.signals for opened in verifier.opens]
    assert [one.relevance for one in asked] == [False, True, False, True]
    assert [one.entropy for one in asked] == [False, False, True, True]
    assert [one.log_probabilities for one in asked] == [False, False, True, True]
    assert (asked[1].num_nearest, asked[3].HasField("num_nearest")) == (3, False)


async def test_what_is_not_allowed_is_refused_by_name() -> None:
    settings = {"max_lambda": 0.5, "allowed_policies": frozenset({AcceptancePolicy.EXACT, AcceptancePolicy.LVSPEC})}
    async with running_stack(FakeVerifier(MODEL), FakeDrafter(MODEL), **settings) as stack:
        for asked, field in (
            (acceptance("FLY"), "acceptance.policy"),
            (acceptance("LVSPEC", 0.6), "acceptance.lambda"),
            (acceptance("EXACT", window=3), "acceptance.window"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(stack, acceptance=asked)
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidArgument)
            assert [violation.field for violation in error.violations] == [field]
        info = await stack.answers.GetServerInfo(answers_pb2.GetServerInfoRequest())
    assert info.max_lambda == 0.5
    assert list(info.allowed_policies) == [answers_pb2.ACCEPTANCE_POLICY_EXACT, answers_pb2.ACCEPTANCE_POLICY_LVSPEC]
    assert info.relevance.num_nearest == 8


async def test_a_deployments_default_is_used() -> None:
    async with running_stack(
        FakeVerifier(MODEL), FakeDrafter(MODEL, agreement=0.5), default_policy=AcceptancePolicy.LVSPEC
    ) as stack:
        answer = await ask(stack)
    assert answer.finished.policy == answers_pb2.ACCEPTANCE_POLICY_LVSPEC
    assert answer.finished.stats.num_loose_tokens > 0


def test_settings_of_policies_are_checked() -> None:
    with pytest.raises(ValueError, match="--default-policy"):
        GatewayConfig("a:1", default_policy=AcceptancePolicy.FLY, allowed_policies=frozenset({AcceptancePolicy.EXACT}))
    with pytest.raises(ValueError, match="--max-lambda"):
        GatewayConfig("a:1", max_lambda=1.5)
