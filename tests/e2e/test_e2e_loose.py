"""Loose acceptance with the real model: what lambda 0 and 1 mean, what is told, what never changes."""

from __future__ import annotations

from bench.world import held_out, write_mp4
from foveate.client import Acceptance, Client, Context, Guarantee, Origin, Policy, Pool

LOOSE = (Origin.LOOSE, Origin.SALVAGED)
UNGUARDED = {"guard_special": False, "guard_numbers": False, "guard_negations": False}


def test_lambda_0_is_byte_equal_to_exact(client: Client, context: Context) -> None:
    for question in ("Describe the video.", "What happens in this video?"):
        exact = client.ask(context, question, max_tokens=60, num_draft_tokens=9)
        for pool in (Pool.PER_ROUND, Pool.RUNNING):
            asked = Acceptance(Policy.LVSPEC, lam=0.0, pool=pool)
            answer = client.ask(context, question, max_tokens=60, num_draft_tokens=9, acceptance=asked)
            assert answer.token_ids == exact.token_ids
            assert answer.text == exact.text
            assert answer.guarantee is Guarantee.LOSSLESS
            assert answer.stats.num_accepted_tokens_per_pos == exact.stats.num_accepted_tokens_per_pos


def test_lambda_1_keeps_every_draft(client: Client, context: Context) -> None:
    asked = Acceptance(Policy.LVSPEC, lam=1.0, **UNGUARDED)  # type: ignore[arg-type]
    # So few visual entries that the drafter is often wrong.
    answer = client.ask(
        context, "Describe the video.", max_tokens=61, num_draft_tokens=5, visual_budget=0.0, acceptance=asked
    )
    per_position = answer.stats.num_accepted_tokens_per_pos
    full_rounds = answer.stats.num_draft_rounds - 1  # the last one may end with the answer
    assert all(number >= full_rounds for number in per_position)
    assert answer.guarantee is Guarantee.LOOSE


def test_a_loose_answer_explains_itself(client: Client, context: Context) -> None:
    asked = Acceptance(Policy.LVSPEC, lam=0.8)
    answer = client.ask(
        context,
        "Describe the video.",
        max_tokens=60,
        num_draft_tokens=9,
        visual_budget=0.0,
        acceptance=asked,
        explain=True,
    )
    assert answer.policy is Policy.LVSPEC
    positions = [place for place, origin in enumerate(answer.origins) if origin in LOOSE]
    assert positions
    assert list(answer.loose_positions) == positions
    assert answer.stats.num_loose_tokens >= len(positions)
    for place, detail in enumerate(answer.details[1:], start=1):
        assert detail.relevance is not None
        assert -1 <= detail.relevance <= 1
        assert detail.log_probability is not None
        assert detail.log_probability <= 0
        assert (detail.target_token_id is not None) == (place in positions)


def test_multiple_choice_is_answered_as_under_exact(client: Client, tmp_path: object) -> None:
    sample = held_out("multiple_choice", 0, num_frame_pairs=8)
    path = f"{tmp_path}/choice.mp4"
    write_mp4(sample.world, path, fps=4.0)
    context = client.create_context(path, fps=4.0)
    exact = client.ask(context, sample.question, max_tokens=20)
    for policy in (Policy.LVSPEC, Policy.FLY, Policy.FLY_GATE, Policy.RANDOM):
        loose = client.ask(context, sample.question, max_tokens=20, acceptance=Acceptance(policy))
        assert loose.text == exact.text
    client.delete_context(context)
