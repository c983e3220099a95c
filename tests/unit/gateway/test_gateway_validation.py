"""Every rule of the contract's comments."""

from __future__ import annotations

import dataclasses
import math

import pytest

from foveate.rpc.errors import InvalidArgument, ResourceExhausted
from gateway.acceptance import AcceptanceFields
from gateway.facts import AcceptanceLimits, ContextSpec, FrameSampling, Limits, MediaChunk
from gateway.samples import each_of
from gateway.validation import (
    AskFields,
    TurnFields,
    UploadCheck,
    check_context_name,
    check_page_size,
    parse_question,
)
from gateway.values import AcceptancePolicy, DraftMode, Role, Sampling, SelectionMethod

LIMITS = Limits(
    max_upload_bytes=4_000_000,
    max_frames=100,
    max_visual_tokens=1000,
    max_thread_tokens=2000,
    max_draft_tokens=9,
    max_tokens_ceiling=512,
    default_max_tokens=64,
    default_num_draft_tokens=5,
    adapts_draft_length=True,
    default_visual_budget=0.1,
    default_fps=2,
    acceptance=AcceptanceLimits(),
    vocab_size=330,
)
GOOD = AskFields(context="contexts/" + "0" * 64, question="What happens?")


def violations(**changes: object) -> list[str]:
    with pytest.raises(InvalidArgument) as caught:
        parse_question(dataclasses.replace(GOOD, **changes), LIMITS)
    return [violation.field for violation in caught.value.violations]


def test_defaults_are_filled_in() -> None:
    question = parse_question(GOOD, LIMITS)
    assert (question.max_tokens, question.sampling.temperature, question.sampling.seed) == (64, 0, None)
    assert question.drafting.mode is DraftMode.DEFAULT
    assert (question.drafting.num_draft_tokens, question.drafting.visual_budget) == (5, None)


def test_a_small_models_video_is_pruned_the_same_for_all_layers() -> None:
    for method in (SelectionMethod.ATTENTION, SelectionMethod.RANDOM, SelectionMethod.RECENT):
        assert violations(draft_mode=DraftMode.SMALL, selection=method) == ["drafting.selection"]
    for method in (SelectionMethod.DEFAULT, SelectionMethod.TWO_STAGE, SelectionMethod.UNIFORM):
        asked = dataclasses.replace(GOOD, draft_mode=DraftMode.SMALL, selection=method)
        assert parse_question(asked, LIMITS).drafting.selection is method


@pytest.mark.parametrize(
    ("field", "values", "path"),
    [
        ("context", ["", "x", "contexts/", "contexts/a/b", "contexts/ü", "contexts/" + "a" * 129], "context"),
        ("question", ["", " \n", "x" * (32 * 1024 + 1), "ü" * (16 * 1024 + 1)], "question"),
        ("max_tokens", [-1, 0, 513, 2**31 - 1], "max_tokens"),
        ("temperature", [-0.1, 10.1, math.nan, math.inf, -math.inf], "sampling.temperature"),
        ("top_p", [-0.1, 0.0, 1.1, math.nan], "sampling.top_p"),
        ("num_draft_tokens", [0, 17, 2**32 - 1], "drafting.num_draft_tokens"),
        ("visual_budget", [-0.1, 1.1, math.nan], "drafting.visual_budget"),
        ("draft_mode", [7, -1], "drafting.mode"),
        ("selection", [6, 99], "drafting.selection"),
        ("stop", [("a",) * 9], "stop"),
        ("stop", [("",), ("x" * 257,)], "stop[0]"),
    ],
)
def test_outside_of_the_range(field: str, values: list[object], path: str) -> None:
    for value in values:
        assert violations(**{field: value}) == [path], value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("question", ["x" * 32 * 1024, "<|video_pad|><|im_end|>"]),
        ("max_tokens", [1, 512]),
        ("temperature", [0.0, 10.0]),
        ("top_p", [1e-6, 1.0]),
        ("num_draft_tokens", [1, 16]),
        ("visual_budget", [0.0, 1.0]),
        ("stop", [(), ("a",) * 8, ("x" * 256,)]),
        ("draft_mode", [0, 1, 2, 3]),
        ("selection", [0, 1, 2, 3]),
    ],
)
def test_the_ends_of_the_range_are_inside(field: str, values: list[object]) -> None:
    for value in values:
        parse_question(dataclasses.replace(GOOD, **{field: value}), LIMITS)


@pytest.mark.parametrize(
    ("roles", "paths"),
    [
        ([], []),
        ([1, 2], []),
        ([1, 2, 1, 2], []),
        ([1], ["history"]),
        ([2, 1], ["history[0].role", "history[1].role"]),
        ([1, 1], ["history[1].role"]),
        ([0, 2], ["history[0].role"]),
        ([1, 2, 1], ["history"]),
    ],
)
def test_history_alternates(roles: list[int], paths: list[str]) -> None:
    history = tuple(TurnFields(role, "text") for role in roles)
    if paths:
        assert violations(history=history) == paths
    else:
        question = parse_question(dataclasses.replace(GOOD, history=history), LIMITS)
        assert [turn.role for turn in question.history] == [Role(role) for role in roles]


def test_all_violations_at_once() -> None:
    assert violations(context="", question="", temperature=-1) == ["context", "question", "sampling.temperature"]


def test_draft_length_is_clipped_to_what_the_verifier_takes() -> None:
    assert parse_question(dataclasses.replace(GOOD, num_draft_tokens=16), LIMITS).drafting.num_draft_tokens == 9


def test_the_draft_length_adapts_where_nobody_names_one_and_no_token_depends_on_it() -> None:
    assert parse_question(GOOD, LIMITS).drafting.max_draft_tokens == 9
    named = dataclasses.replace(GOOD, num_draft_tokens=5)
    loose = dataclasses.replace(GOOD, acceptance=AcceptanceFields(policy=AcceptancePolicy.FLY))
    for asked, limits in (
        (named, LIMITS),
        (loose, LIMITS),
        (GOOD, dataclasses.replace(LIMITS, adapts_draft_length=False)),
    ):
        drafting = parse_question(asked, limits).drafting
        assert (drafting.num_draft_tokens, drafting.max_draft_tokens) == (5, None)


def test_seeds() -> None:
    warm = dataclasses.replace(GOOD, temperature=0.8)
    drawn = {parse_question(warm, LIMITS).sampling.seed for _ in range(5)}
    assert len(drawn) == 5
    assert parse_question(dataclasses.replace(warm, seed=0), LIMITS).sampling.seed == 0
    assert parse_question(dataclasses.replace(GOOD, seed=42), LIMITS).sampling.seed is None


def test_names_and_page_sizes() -> None:
    assert check_context_name("name", GOOD.context) == GOOD.context
    with pytest.raises(InvalidArgument):
        check_context_name("name", "videos/1")
    assert (check_page_size(0), check_page_size(1000)) == (100, 1000)
    with pytest.raises(InvalidArgument):
        check_page_size(1001)


UPLOAD = ContextSpec(path=None, filename="a.mp4")


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ([None], "payload"),
        ([MediaChunk(0, b"x")], "spec"),
        ([UPLOAD, UPLOAD], "spec"),
        ([ContextSpec(path="")], "spec.source"),
        ([ContextSpec(path="a.mp4"), MediaChunk(0, b"x")], "chunk"),
        ([ContextSpec(None, url="https://a.example/a.mp4"), MediaChunk(0, b"x")], "chunk"),
        ([UPLOAD, MediaChunk(1, b"x")], "chunk.write_offset"),
        ([UPLOAD, MediaChunk(0, b"x"), MediaChunk(0, b"x")], "chunk.write_offset"),
        ([UPLOAD, MediaChunk(0, b"x" * (1024 * 1024 + 1))], "chunk.data"),
        ([ContextSpec(None, sampling=FrameSampling(fps=0))], "spec.sampling.fps"),
        ([ContextSpec(None, sampling=FrameSampling(fps=math.nan))], "spec.sampling.fps"),
        ([ContextSpec(None, sampling=FrameSampling(fps=61))], "spec.sampling.fps"),
        ([ContextSpec(None, sampling=FrameSampling(max_frames=0))], "spec.sampling.max_frames"),
        ([ContextSpec(None, sampling=FrameSampling(max_frames=10**9))], "spec.sampling.max_frames"),
    ],
)
def test_wrong_uploads(parts: list[ContextSpec | MediaChunk | None], field: str) -> None:
    check = UploadCheck(LIMITS)
    for part in parts[:-1]:
        check.check(part)
    with pytest.raises(InvalidArgument) as caught:
        check.check(parts[-1])
    assert [violation.field for violation in caught.value.violations] == [field]


def test_an_upload_that_never_says_what_it_is() -> None:
    with pytest.raises(InvalidArgument, match="spec"):
        UploadCheck(LIMITS).check_end()


def test_an_upload_over_the_limit_names_both_numbers() -> None:
    with pytest.raises(ResourceExhausted, match="5000000") as caught:
        UploadCheck(LIMITS).check(ContextSpec(None, total_bytes=5_000_000))
    assert caught.value.metadata == {"num_bytes": "5000000", "max_upload_bytes": "4000000"}


def test_an_upload_that_grows_over_the_limit() -> None:
    check = UploadCheck(LIMITS)
    check.check(UPLOAD)
    for index in range(3):
        check.check(MediaChunk(index * 1024 * 1024, b"x" * 1024 * 1024))
    with pytest.raises(ResourceExhausted):
        check.check(MediaChunk(3 * 1024 * 1024, b"x" * 1024 * 1024))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"repetition_penalty": 10.5}, "sampling.repetition_penalty"),
        ({"repetition_penalty": math.nan}, "sampling.repetition_penalty"),
        ({"presence_penalty": -2.1}, "sampling.presence_penalty"),
        ({"frequency_penalty": math.inf}, "sampling.frequency_penalty"),
        ({"logit_bias": ((330, 1.0),)}, "sampling.logit_bias[330]"),
        ({"logit_bias": ((7, -100.5),)}, "sampling.logit_bias[7]"),
        ({"logit_bias": ((7, math.nan),)}, "sampling.logit_bias[7]"),
        ({"logit_bias": tuple((token_id % 330, 0.0) for token_id in range(1025))}, "sampling.logit_bias"),
        ({"min_tokens": 65}, "sampling.min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"n": 0, "temperature": 1.0}, "n"),
        ({"n": 9, "temperature": 1.0}, "n"),
        ({"n": 2}, "n"),
        ({"n": 2, "temperature": 1.0, "conversation": "c"}, "n"),
    ],
)
def test_output_options_that_cannot_be_had_are_refused_by_name(changes: dict[str, object], field: str) -> None:
    assert violations(**changes) == [field]


def test_output_options_are_passed_on() -> None:
    plain = parse_question(GOOD, LIMITS)
    assert (plain.num_top_logprobs, plain.ignore_eos, plain.num_answers, plain.sampling.min_tokens) == (
        None,
        False,
        1,
        0,
    )
    asked = dataclasses.replace(
        GOOD,
        temperature=0.5,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((329, 100.0),),
        min_tokens=64,
        logprobs=True,
        ignore_eos=True,
        n=3,
    )
    question = parse_question(asked, LIMITS)
    assert question.sampling == Sampling(0.5, 0, 1.0, 2**64 - 1, 1.5, -2.0, 2.0, ((329, 100.0),), 64)
    assert (question.num_top_logprobs, question.ignore_eos, question.num_answers) == (0, True, 3)
    assert [one.sampling.seed for one in each_of(question)] == [2**64 - 1, 0, 1]
    assert {one.num_answers for one in each_of(question)} == {1}
