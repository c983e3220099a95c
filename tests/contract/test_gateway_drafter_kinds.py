"""Which kinds of drafts are admitted (case S4), what each asks of the services, and what happens without one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

import foveate
from foveate.rpc.errors import FailedPrecondition
from foveate.v1 import answers_pb2, kv_pb2
from gateway.config import GatewayConfig
from tests.fakes import (
    CONTEXT,
    FakeDrafter,
    FakeVerifier,
    Stack,
    ToyModel,
    ask,
    running_stack,
    serving_drafter,
    serving_gateway,
    serving_verifier,
    until,
)

MODEL = ToyModel.of("The red square moves left.")
MODES = {
    name: answers_pb2.DraftMode.Value(f"DRAFT_MODE_{name}") for name in ("SPARSE", "STREAMING", "LAYERSKIP", "SMALL")
}


def drafter_of(*names: str) -> FakeDrafter:
    drafter = FakeDrafter(MODEL)
    drafter.modes = [MODES[name] for name in names]
    return drafter


@pytest.mark.parametrize("name", list(MODES))
async def test_a_kind_gets_what_it_needs(name: str) -> None:
    verifier, drafter = FakeVerifier(MODEL), drafter_of(*MODES)
    async with running_stack(verifier, drafter) as stack:
        answer = await ask(stack, drafting=answers_pb2.Drafting(mode=MODES[name]))
        plain = await ask(stack, drafting=answers_pb2.Drafting(mode=answers_pb2.DRAFT_MODE_OFF))
    assert answer.token_ids == plain.token_ids
    assert answer.finished.stats.draft_mode == MODES[name]
    assert not answer.finished.notes
    opened, asked = drafter.opens[0], verifier.opens[0]
    assert opened.mode == MODES[name]
    is_selected, is_small = name in ("SPARSE", "SMALL"), name == "SMALL"
    assert asked.HasField("visual_budget") == opened.HasField("selection") == is_selected
    assert (asked.wants_video, bool(opened.prompt_token_ids)) == (is_small, is_small)
    assert opened.visual_budget == pytest.approx(0.1 if is_small else 0.05)
    expected = answers_pb2.SELECTION_METHOD_TWO_STAGE if is_small else answers_pb2.SELECTION_METHOD_UNSPECIFIED
    assert asked.selection == expected


async def test_what_is_not_offered_is_said_and_replaced() -> None:
    async with running_stack(FakeVerifier(MODEL), drafter_of("SPARSE")) as stack:
        answer = await ask(stack, drafting=answers_pb2.Drafting(mode=MODES["SMALL"]))
        info = await stack.answers.GetServerInfo(answers_pb2.GetServerInfoRequest())
    assert answer.finished.stats.draft_mode == answers_pb2.DRAFT_MODE_NGRAM
    assert list(answer.finished.notes) == ["the drafter offers no small drafts; the answer used n-gram drafts"]
    assert MODES["SPARSE"] in info.draft_modes
    assert MODES["SMALL"] not in info.draft_modes


async def test_a_drafter_with_a_small_model_alone_drafts_by_default() -> None:
    drafter = drafter_of("SMALL")
    drafter.model_fingerprint = "a" * 32  # another model, with the same tokenizer
    async with running_stack(FakeVerifier(MODEL), drafter) as stack:
        answer = await ask(stack)
    assert answer.finished.stats.draft_mode == MODES["SMALL"]


async def test_kinds_of_other_models_are_refused_each_for_itself() -> None:
    drafter = drafter_of("SPARSE", "SMALL")
    drafter.model_fingerprint = "a" * 32
    async with running_stack(FakeVerifier(MODEL), drafter) as stack:
        assert stack.backends.drafters.kinds == {MODES["SMALL"]}
        info = await stack.answers.GetServerInfo(answers_pb2.GetServerInfoRequest())
    assert MODES["SPARSE"] not in info.draft_modes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": "99.1.0"}, f"the drafter runs Foveate 99.1.0, this gateway {foveate.__version__}"),
        ({"version": ""}, f"the drafter runs Foveate of no version, this gateway {foveate.__version__}"),
        ({"tokenizer_sha256": "0" * 64}, "the drafter's toy has tokenizer 000000000000, the verifier's toy "),
        ({"model_fingerprint": "a" * 32}, "the drafter runs toy (aaaaaaaaaaaa), the verifier toy (ffffffffffff)"),
        (
            {"layout": kv_pb2.KvLayout(dtype="bfloat16", num_layers=2, num_kv_heads=1, head_dim=8)},
            "the drafter's KV is 2 layers, 1 KV heads of 8, bfloat16, the verifier's 0 layers, ",
        ),
        ({"modes": []}, "the drafter offers no drafts"),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_with_both_sides_named(
    changes: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = drafter_of("SPARSE")
    async with running_stack(FakeVerifier(MODEL), drafter) as stack:
        drafters = stack.backends.drafters
        for name, value in changes.items():
            setattr(drafter, name, value)
        drafters.peers[0].is_ready = False  # as when its health was lost: it is looked at anew
        await until(lambda: bool(drafters.refusal))
        answer = await ask(stack)
        assert not drafter.opens
        (note,) = answer.finished.notes
        assert note.startswith(f"the drafter is not used: {told}")
        await asyncio.sleep(0.2)
        warned = [one.getMessage() for one in caplog.records if "drafter cannot be used yet" in one.getMessage()]
        assert len(warned) == 1  # and not at every look
        assert told in warned[0]
        drafter.__dict__.update(drafter_of("SPARSE").__dict__)
        await until(lambda: drafters.is_ready)
        assert not (await ask(stack)).finished.notes


@contextlib.asynccontextmanager
async def with_drafters(verifier: FakeVerifier, drafters: tuple[FakeDrafter, ...]) -> AsyncIterator[Stack]:
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving_verifier(verifier))
        ports = [(await stack.enter_async_context(serving_drafter(one))).port for one in drafters]
        config = GatewayConfig(
            verifier=f"127.0.0.1:{served.port}",
            drafter=",".join(f"127.0.0.1:{port}" for port in ports),
            health_interval_s=0.02,
        )
        running = await stack.enter_async_context(serving_gateway(verifier, drafters[0], config))
        await until(lambda: running.backends.drafters.num_ready == len(drafters))
        yield running


async def test_an_answer_is_drafted_where_its_verifiers_memory_is() -> None:
    near, far = drafter_of("SPARSE"), drafter_of("SPARSE")
    far.namespace = "elsewhere"
    verifier = FakeVerifier(MODEL)
    async with with_drafters(verifier, (far, near)) as stack:
        for _ in range(3):
            answer = await ask(stack)
            assert answer.finished.stats.draft_mode == MODES["SPARSE"]
            assert not answer.finished.notes
        assert (len(far.opens), len(near.opens)) == (0, 3)
        verifier.namespace = "elsewhere"
        assert not (await ask(stack)).finished.notes
        assert (len(far.opens), len(near.opens)) == (1, 3)


async def test_drafters_share_the_answers_and_stand_in_for_each_other() -> None:
    one, two = drafter_of("SPARSE"), drafter_of("SPARSE")
    verifier = FakeVerifier(MODEL)
    async with with_drafters(verifier, (one, two)) as stack:
        verifier.delay_s = 0.05
        await asyncio.gather(*(ask(stack, context=CONTEXT) for _ in range(4)))
        assert (len(one.opens), len(two.opens)) == (2, 2)
        verifier.delay_s = 0.0
        one.open_error = foveate_error()
        assert not (await ask(stack)).finished.notes  # taken by the other one
        two.open_error = foveate_error()
        (note,) = (await ask(stack)).finished.notes
        assert "did not attach (KV_STALE)" in note
        assert all(peer.num_open == 0 for peer in stack.backends.drafters.peers)


def foveate_error() -> FailedPrecondition:
    return FailedPrecondition("the pool is gone", reason="KV_STALE")
