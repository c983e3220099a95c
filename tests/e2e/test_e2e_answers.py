"""Answers of the real stack: streamed, drafted, equal to plain decoding, reproducible (case S6)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from foveate.cli.up import status_line
from foveate.client import AsyncClient, Client, Context, DraftMode, FinishReason, Guarantee, Selection
from foveate.stack import Stack
from tests.e2e.support import FPS, MAX_THREAD_TOKENS, long_answer

QUESTIONS = ("Describe the video.", "What is happening in this clip?", "What do you see in the video?")


def test_a_streamed_answer_is_drafted_and_equals_plain_decoding(client: Client, context: Context) -> None:
    num_accepted = 0
    for question in QUESTIONS:
        with client.stream(context, question, explain=True) as stream:
            deltas = list(stream)
            drafted = stream.result
        plain = client.ask(context, question, draft=DraftMode.OFF)
        assert len(deltas) > 1
        assert "".join(delta.text for delta in deltas) == drafted.text == plain.text
        assert drafted.token_ids == plain.token_ids
        assert drafted.guarantee is Guarantee.LOSSLESS
        assert drafted.stats.draft_mode is DraftMode.SPARSE
        assert drafted.notes == ()
        assert len(drafted.origins) == len(drafted.token_texts) == drafted.num_output_tokens
        assert drafted.stats.num_rounds < plain.stats.num_rounds
        assert plain.stats.num_draft_tokens == 0
        num_accepted += drafted.stats.num_accepted_tokens
    assert num_accepted >= 10


def test_statistics_add_up(client: Client, context: Context) -> None:
    answer = client.ask(context, QUESTIONS[0], num_draft_tokens=4)
    stats = answer.stats
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens <= stats.num_draft_tokens
    assert len(stats.num_accepted_tokens_per_pos) <= 4
    assert stats.num_draft_tokens <= 4 * stats.num_draft_rounds
    assert stats.num_loose_tokens == 0
    assert answer.num_output_tokens == len(answer.token_ids) <= 1 + stats.num_rounds + stats.num_accepted_tokens
    assert answer.num_cached_tokens == context.num_tokens
    assert stats.time_to_first_token_ms > 0
    assert len(stats.round_overhead_ms) == stats.num_rounds


def test_every_way_of_drafting_gives_the_same_answer(client: Client, context: Context) -> None:
    for options in ({}, {"temperature": 0.8, "seed": 3, "top_p": 0.95, "top_k": 40}):
        texts = {
            client.ask(context, QUESTIONS[0], draft=draft, selection=selection, visual_budget=budget, **options).text  # type: ignore[misc]
            for draft, selection, budget in (
                (DraftMode.OFF, None, None),
                (DraftMode.NGRAM, None, None),
                (DraftMode.SPARSE, Selection.ATTENTION, 0.05),
                (DraftMode.SPARSE, Selection.RANDOM, 0.25),
                (DraftMode.SPARSE, Selection.RECENT, 0.0),
                (DraftMode.SPARSE, Selection.ATTENTION, 1.0),
            )
        }
        assert len(texts) == 1


def test_the_whole_budget_is_accepted_whole(client: Client, context: Context) -> None:
    stats = client.ask(context, QUESTIONS[0], visual_budget=1.0, num_draft_tokens=4).stats
    assert stats.num_accepted_tokens >= 0.8 * (stats.num_draft_tokens - 4)


def test_a_length_that_adapts_is_told(client: Client, context: Context) -> None:
    plain = client.ask(context, QUESTIONS[0], draft=DraftMode.OFF)
    drafted = client.ask(context, QUESTIONS[0], visual_budget=0.0, temperature=0.0)
    assert (drafted.text, drafted.stats.draft_mode, drafted.notes) == (plain.text, DraftMode.SPARSE, ())
    assert sum(drafted.stats.num_rounds_per_draft_length) == drafted.stats.num_rounds


def test_a_seed_gives_one_answer_alone_and_in_company(client: Client, context: Context, stack: Stack) -> None:
    alone = [client.ask(context, QUESTIONS[0], temperature=1.0, seed=42).token_ids for _ in range(2)]

    async def in_company() -> list[tuple[int, ...]]:
        async with AsyncClient(stack.addresses.gateway) as together:
            asks = (together.ask(context, QUESTIONS[0], temperature=1.0, seed=seed) for seed in (42, *range(7)))
            return [answer.token_ids for answer in await asyncio.gather(*asks)]

    beside_others = asyncio.run(in_company())
    assert alone[0] == alone[1] == beside_others[0]
    assert len(set(beside_others)) > 4


def test_two_unseeded_answers_differ_and_name_their_seeds(client: Client, context: Context) -> None:
    first, second = (client.ask(context, QUESTIONS[0], temperature=1.5, max_tokens=64) for _ in range(2))
    assert first.token_ids != second.token_ids
    assert first.seed is not None
    again = client.ask(context, QUESTIONS[0], temperature=1.5, max_tokens=64, seed=first.seed)
    assert again.token_ids == first.token_ids


def test_a_stop_string_ends_the_answer_before_it(client: Client, context: Context) -> None:
    whole = client.ask(context, QUESTIONS[0]).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 7]  # starts and ends inside words
    cut = client.ask(context, QUESTIONS[0], stop=[stop, "never seen"])
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason is FinishReason.STOP


def test_max_tokens_is_exact(client: Client, context: Context) -> None:
    whole = client.ask(context, QUESTIONS[0])
    for max_tokens in (1, 2, 7):
        answer = client.ask(context, QUESTIONS[0], max_tokens=max_tokens, num_draft_tokens=5)
        assert answer.token_ids == whole.token_ids[:max_tokens]
        assert answer.finish_reason is FinishReason.LENGTH


def test_the_room_for_a_conversation_ends_an_answer_without_a_crash(client: Client, context: Context) -> None:
    _, options = long_answer(client, context)
    word = "red "
    per_word = _num_thread_tokens(client, context, word * 21) - _num_thread_tokens(client, context, word * 20)
    template = _num_thread_tokens(client, context, word * 20) - 20 * per_word
    num_words = (MAX_THREAD_TOKENS - 3 - template) // per_word
    question = word * num_words
    room = MAX_THREAD_TOKENS - _num_thread_tokens(client, context, question)
    answer = client.ask(context, question, num_draft_tokens=5, **options)
    assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.EOS)
    assert 1 <= answer.num_output_tokens <= room + 1
    assert room < 3 + per_word


def _num_thread_tokens(client: Client, context: Context, question: str) -> int:
    return client.ask(context, question, max_tokens=1).num_prompt_tokens - context.num_tokens


def test_the_same_video_again_is_reused_also_by_path(client: Client, context: Context, video: Path) -> None:
    assert client.create_context(video, fps=FPS).reused
    by_path = client.create_context(server_path="clip.mp4", fps=FPS)
    assert (by_path.name, by_path.reused) == (context.name, True)
    assert client.create_context(video, fps=1.0).name != context.name
    assert context.name in {held.name for held in client.list_contexts()}


def test_a_conversation_goes_on_from_its_history(client: Client, context: Context) -> None:
    first = client.ask(context, QUESTIONS[0])
    second = client.ask(context, "How many objects are there?", history=first.turns)
    assert second.num_cached_tokens == context.num_tokens
    assert second.num_prompt_tokens > first.num_prompt_tokens + first.num_output_tokens
    plain = client.ask(context, "How many objects are there?", history=first.turns, draft=DraftMode.OFF)
    assert second.token_ids == plain.token_ids


@pytest.mark.parametrize("mark", ["<|video_pad|>", "<|image_pad|>", "<|vision_start|>", "<|im_end|>", "<|im_start|>"])
def test_marks_of_the_template_in_a_question_are_plain_text(client: Client, context: Context, mark: str) -> None:
    bare = client.ask(context, "What is  this?", max_tokens=8)
    marked = client.ask(context, f"What is {mark} this?", max_tokens=8)
    assert marked.num_prompt_tokens - bare.num_prompt_tokens > 2  # one token, had it been taken for the mark
    assert marked.num_cached_tokens == context.num_tokens


def test_the_status_line_says_what_is_going_on(stack: Stack, client: Client, context: Context) -> None:
    line = status_line(stack, client)
    for part in (stack.addresses.gateway, client.server_info().model, "drafter over shm", "0 answers", "deterministic"):
        assert part in line
    assert f"{len(client.list_contexts())} contexts" in line


def test_a_deleted_context_is_gone_and_comes_back(client: Client, folder: Path) -> None:
    made = client.create_context(folder / "other.mp4", fps=FPS)
    before = client.ask(made, QUESTIONS[0])
    client.delete_context(made)
    assert made.name not in {held.name for held in client.list_contexts()}
    again = client.create_context(folder / "other.mp4", fps=FPS)
    assert (again.name, again.reused) == (made.name, False)
    assert client.ask(again, QUESTIONS[0]).token_ids == before.token_ids
