import json
import sys

import pytest
import torch

from bench import sparsity
from bench.evidence import RULES, PromptRows, evidence_shares
from bench.sparse_drafting import draft, sparse_context
from bench.sparsity import Asker, Prompt, redundant
from bench.world import HELD_OUT, held_out
from bench.world.model import TOKEN_ID
from engine.selection import SelectionMethod
from foveate.checkpoints import default_checkpoint


@pytest.fixture(scope="module")
def asker() -> Asker:
    return Asker(default_checkpoint())


@pytest.fixture(scope="module")
def prompt(asker: Asker) -> Prompt:
    return asker.ask(held_out("describe", 4, num_frame_pairs=24, brief=True))


def select(asker: Asker, prompt: Prompt, budget: float) -> torch.Tensor:
    return asker.select(prompt, SelectionMethod.ATTENTION, prompt.scores, budget)


@pytest.mark.parametrize("num_draft_tokens", [1, 5, 9])
def test_with_every_entry_every_draft_is_accepted(asker: Asker, prompt: Prompt, num_draft_tokens: int) -> None:
    context = sparse_context(asker.backend, prompt.text_index, select(asker, prompt, 1.0))
    outcome = draft(asker.backend, prompt.answered, context, num_draft_tokens=num_draft_tokens)
    assert prompt.answered.token_ids[-1] == TOKEN_ID["<|im_end|>"]
    assert outcome.num_accepted == outcome.num_drafted
    num_tokens = len(prompt.answered.token_ids) - 1
    assert outcome.num_rounds == -(-num_tokens // (num_draft_tokens + 1))
    assert outcome.num_accepted + outcome.num_rounds in (num_tokens, num_tokens + 1)


def test_without_entries_fewer_drafts_are_accepted(asker: Asker, prompt: Prompt) -> None:
    whole, none = (
        draft(
            asker.backend,
            prompt.answered,
            sparse_context(asker.backend, prompt.text_index, select(asker, prompt, budget)),
            num_draft_tokens=9,
        )
        for budget in (1.0, 0.0)
    )
    assert none.num_accepted < none.num_drafted
    assert none.accepted_per_round < whole.accepted_per_round


def test_the_engines_scores_are_one_of_the_rules(prompt: Prompt) -> None:
    rule = RULES["max to the prompt's end"]
    scores = torch.stack([rule(attention, prompt.rows) for attention in prompt.attention])
    torch.testing.assert_close(scores, prompt.scores, atol=1e-5, rtol=1e-4)


def test_rows_of_the_question_are_its_words(asker: Asker, prompt: Prompt) -> None:
    tokenizer = asker.answerer.processor.tokenizer
    num_words = len(tokenizer(prompt.sample.question)["input_ids"])
    assert prompt.rows.question.stop - prompt.rows.question.start == num_words
    assert prompt.rows.to_end.stop == prompt.answered.num_prompt
    assert int(prompt.evidence.sum()) > 0


def test_shares_of_evidence() -> None:
    attention = torch.tensor([[[0.1, 0.2, 0.0, 0.1], [0.5, 0.5, 0.5, 0.5]]])  # one head, two rows, four entries
    rows = PromptRows(question=slice(0, 1), to_end=slice(0, 2))
    shares = evidence_shares(
        [attention],
        rows,
        selection=torch.tensor([[[11, 13]]]),
        visual_index=torch.tensor([10, 11, 12, 13]),
        evidence=torch.tensor([False, True, True, False]),
    )
    assert shares.of_attention == pytest.approx([0.5])
    assert shares.of_selected == [0.5]
    assert shares.found == [0.5]
    assert shares.by_chance == 0.5


def test_redundant_videos_are_held_out_and_show_everything_always() -> None:
    for index in range(10):
        sample = redundant(index, 12)
        assert sample.seed in HELD_OUT
        assert len(sample.world.scenes) == 1
        assert all((thing.first_pair, thing.end_pair) == (0, 12) for thing in sample.world.things)


@pytest.mark.parametrize("flags", [[], ["--rules"]])
def test_the_last_line_holds_t_by_drafts_selection_and_budget(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sparsity", "--prompts", "1", "--frame-pairs", "8", *flags])
    sparsity.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    if flags:
        assert set(result["T"]["9"]) == set(RULES)
        return
    for part in (result["brief"], result["redundant"]):
        assert set(part["T"]) == {"5", "9"}
        assert set(part["T"]["5"]["random"]) == {"2", "5", "10", "25"}
        assert part["T"]["9"]["none"]["0"][0] <= part["T"]["9"]["all"]["100"][0]
        assert len(part["evidence"]["of_attention"]) == 6
