"""Does looking at the right place matter, and do the question's words look there?

    python -m bench.sparsity [--prompts 40] [--frame-pairs 96] [--rules]

Two kinds of held-out questions that ask to describe objects. Brief: the asked objects are visible for two to four frame
pairs only. Redundant: one scene, every object visible all the time, so that any few frames show everything.

For each layer: the share of the question's attention to visual entries, and of the entries that attention selects (at
5 %), that falls on cells which show an asked object. Then T, accepted draft tokens per round without the recovered or
bonus token, by how visual entries are selected and how many; the ceiling drafts from all of them, the floor from none.
The verifier's greedy answers are drafted in this process, with the engine's kernels and selection; `bench.drafting`
measures the same through the services. Errors are standard errors over prompts; differences are paired.

`--rules` compares rules for reading scores off the question's attention, on validation questions about brief objects.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.evidence import (
    RULES,
    EvidenceShares,
    PromptRows,
    QueryKeeper,
    attention_rows,
    evidence_shares,
)
from bench.report import mean_and_error, print_json, print_table, say
from bench.sparse_drafting import Answered, Outcome, answer, draft, sparse_context
from bench.world import Plan, Sample, asked_cells, held_out, iterate_mp4, sample_world, validation, write_mp4
from bench.world.answerer import FPS, MAX_NEW_TOKENS, VIDEO_PAD, Answerer
from bench.world.engine_backend import EngineBackend
from bench.world.model import TOKEN_ID
from bench.world.questions import ask_describe
from engine.selection import ScoreTap, SelectionMethod, select
from foveate.checkpoints import default_checkpoint

BUDGETS = (0.02, 0.05, 0.10, 0.25)
DRAFT_LENGTHS = (5, 9)
HEADLINE_BUDGET = 0.05
HEADLINE_DRAFTS = 9

Setting = tuple[str, float, int]  # how entries are selected, the share of them, num_draft_tokens
Outcomes = dict[Setting, list[Outcome]]


@dataclass(frozen=True)
class Prompt:
    """A question about a prefilled video, answered."""

    sample: Sample
    answered: Answered
    rows: PromptRows
    attention: list[Tensor]  # of each layer, [num_kv_heads, num_rows, num_visual]
    scores: Tensor  # the engine's, [num_layers, num_kv_heads, num_visual]
    text_index: Tensor
    visual_index: Tensor
    evidence: Tensor  # bool [num_visual]


class Asker:
    """Reads a sample's video from a file and asks, with taps on the queries."""

    def __init__(self, checkpoint: Path) -> None:
        self.answerer = Answerer.load(checkpoint)
        backend = self.answerer.backend
        if not isinstance(backend, EngineBackend):
            raise SystemExit(f"the engine does not know the model in {checkpoint}")
        self.backend = backend
        encode, chat = self.answerer.processor.tokenizer, self.answerer.family.chat
        self._num_before = len(encode(chat.after_video)["input_ids"])
        self._num_after = len(encode(chat.to_assistant)["input_ids"])

    def ask(self, sample: Sample) -> Prompt:
        reading = self.answerer.begin()
        with tempfile.TemporaryDirectory(prefix="foveate-bench-") as folder:
            path = Path(folder) / "video.mp4"
            write_mp4(sample.world, path, fps=FPS)
            for frames in iterate_mp4(path):
                reading.see(frames)
        prompt, positions, num_prefix = reading.prefill(sample.question)
        is_visual = torch.tensor(prompt[:num_prefix]) == TOKEN_ID[VIDEO_PAD]
        visual_index, num_rows = is_visual.nonzero()[:, 0], len(prompt) - num_prefix
        rows = PromptRows(slice(self._num_before, num_rows - self._num_after), slice(self._num_before, num_rows))
        keeper = QueryKeeper()
        answered = answer(
            self.backend,
            prompt[num_prefix:],
            positions[:, num_prefix:],
            end_id=TOKEN_ID["<|im_end|>"],
            max_new_tokens=MAX_NEW_TOKENS,
            query_tap=keeper,
        )
        keys, scaling = self.backend.context[0], self.backend.runner.scaling
        attention = [
            attention_rows(query, keys[layer], answered.thread[0][layer, :, :num_rows], visual_index, scaling)
            for layer, query in enumerate(keeper.queries)
        ]
        tap = ScoreTap(keys, answered.thread[0], 0, visual_index=visual_index, rows=rows.to_end, scaling=scaling)
        for layer, query in enumerate(keeper.queries):
            tap.on_layer(layer, query)
        evidence = torch.zeros(len(visual_index), dtype=torch.bool)
        cells = torch.from_numpy(asked_cells(sample)).flatten()
        evidence[: len(cells)] = cells
        text_index = (~is_visual).nonzero()[:, 0]
        return Prompt(sample, answered, rows, attention, tap.scores, text_index, visual_index, evidence)

    def select(self, prompt: Prompt, method: SelectionMethod, scores: Tensor, budget: float) -> Tensor:
        num_visual = prompt.visual_index.numel()
        return select(
            method,
            scores,
            visual_index=prompt.visual_index,
            num_selected=round(budget * num_visual),
            layout=self.backend.loaded.layout,
            generator=torch.Generator().manual_seed(prompt.sample.seed),
        )

    def outcomes(self, prompt: Prompt, selection: Tensor) -> dict[int, Outcome]:
        """By num_draft_tokens."""
        context = sparse_context(self.backend, prompt.text_index, selection)
        return {num: draft(self.backend, prompt.answered, context, num_draft_tokens=num) for num in DRAFT_LENGTHS}


def redundant(index: int, num_frame_pairs: int) -> Sample:
    """A held-out question about a video of one scene in which everything is visible all the time."""
    seed = held_out("describe", index, num_frame_pairs=num_frame_pairs).seed
    drawn = sample_world(seed, Plan(num_frame_pairs, max_things=2, max_scenes=1, brief_share=0.0))
    things = tuple(dataclasses.replace(thing, first_pair=0, end_pair=num_frame_pairs) for thing in drawn.things)
    return ask_describe(random.Random(f"{seed} redundant"), dataclasses.replace(drawn, things=things))


def main() -> None:
    arguments = _parse_arguments()
    torch.set_num_threads(1)
    asker = Asker(arguments.model)
    if arguments.rules:
        print_json(_compare_rules(asker, arguments.prompts, arguments.frame_pairs))
        return
    indices = range(arguments.prompts)
    brief = [held_out("describe", index, num_frame_pairs=arguments.frame_pairs, brief=True) for index in indices]
    result = {
        "brief": _measure(asker, "objects visible for two to four frame pairs", brief),
        "redundant": _measure(
            asker, "everything visible all the time", [redundant(index, arguments.frame_pairs) for index in indices]
        ),
    }
    print_json({"prompts": arguments.prompts, "num_visual_tokens": 9 * arguments.frame_pairs, **result})


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--frame-pairs", type=int, default=96)
    parser.add_argument("--rules", action="store_true", help="compare selection rules on validation questions")
    parser.add_argument("--model", type=Path, default=default_checkpoint())
    return parser.parse_args()


def _measure(asker: Asker, title: str, samples: list[Sample]) -> dict[str, Any]:
    outcomes: Outcomes = defaultdict(list)
    shares: list[EvidenceShares] = []
    started_s = time.monotonic()
    for count, sample in enumerate(samples, start=1):
        prompt = asker.ask(sample)
        selections = {
            (method.value, budget): asker.select(prompt, method, prompt.scores, budget)
            for method in SelectionMethod
            for budget in BUDGETS
        }
        selections["none", 0.0] = asker.select(prompt, SelectionMethod.RECENT, prompt.scores, 0.0)
        selections["all", 1.0] = asker.select(prompt, SelectionMethod.RECENT, prompt.scores, 1.0)
        for (name, budget), selection in selections.items():
            for num, outcome in asker.outcomes(prompt, selection).items():
                outcomes[name, budget, num].append(outcome)
        chosen = selections[SelectionMethod.ATTENTION.value, HEADLINE_BUDGET]
        shares.append(evidence_shares(prompt.attention, prompt.rows, chosen, prompt.visual_index, prompt.evidence))
        if count % 10 == 0:
            say(f"{count}/{len(samples)} prompts, {time.monotonic() - started_s:.0f} s")
    _print_shares(title, shares)
    _print_outcomes(title, outcomes)
    return {
        "evidence": _shares_json(shares),
        "T": _outcomes_json(outcomes),
        "attention_over_random": _headline(outcomes),
    }


def _shares_json(shares: list[EvidenceShares]) -> dict[str, Any]:
    def mean(values: list[float]) -> float:
        return round(mean_and_error(values)[0], 4)

    by_layer = {
        name: [mean(list(layer)) for layer in zip(*(getattr(one, name) for one in shares), strict=True)]
        for name in ("of_attention", "of_selected", "found")
    }
    return {"by_chance": mean([one.by_chance for one in shares]), **by_layer}


def _outcomes_json(outcomes: Outcomes) -> dict[str, Any]:
    nested: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for (name, budget, num), group in outcomes.items():
        mean, error = mean_and_error([one.accepted_per_round for one in group])
        nested[str(num)][name][f"{budget * 100:g}"] = [round(mean, 3), round(error, 3)]
    return nested


def _headline(outcomes: Outcomes) -> dict[str, float]:
    attention, rand = (
        [one.accepted_per_round for one in outcomes[method.value, HEADLINE_BUDGET, HEADLINE_DRAFTS]]
        for method in (SelectionMethod.ATTENTION, SelectionMethod.RANDOM)
    )
    difference, error = mean_and_error([one - other for one, other in zip(attention, rand, strict=True)])
    return {
        "ratio": round(sum(attention) / max(1e-9, sum(rand)), 3),
        "difference": round(difference, 3),
        "standard_error": round(error, 3),
    }


def _print_shares(title: str, shares: list[EvidenceShares]) -> None:
    values = _shares_json(shares)
    columns = ("layer", "of the question's attention", f"of the top {HEADLINE_BUDGET:.0%}", "of the evidence, selected")
    rows = [
        (str(layer), *(f"{values[name][layer]:.1%}" for name in ("of_attention", "of_selected", "found")))
        for layer in range(len(values["found"]))
    ]
    print_table(f"{title}: what falls on asked objects' cells ({values['by_chance']:.1%} of all)", columns, rows)


def _print_outcomes(title: str, outcomes: Outcomes) -> None:
    names = list(dict.fromkeys((name, budget) for name, budget, _ in outcomes))
    rows = []
    for name, budget in names:
        cells = []
        for num in DRAFT_LENGTHS:
            mean, error = mean_and_error([one.accepted_per_round for one in outcomes[name, budget, num]])
            cells.append(f"{mean:.2f} ± {error:.2f}")
        rows.append((name, f"{budget:.0%}", *cells))
    columns = ("selection", "budget", *(f"T at {num} drafts" for num in DRAFT_LENGTHS))
    print_table(title, columns, rows)


def _compare_rules(asker: Asker, num_prompts: int, num_frame_pairs: int) -> dict[str, Any]:
    outcomes: Outcomes = defaultdict(list)
    for index in range(num_prompts):
        prompt = asker.ask(validation("describe", index, num_frame_pairs=num_frame_pairs, brief=True))
        for name, rule in RULES.items():
            scores = torch.stack([rule(attention, prompt.rows) for attention in prompt.attention])
            for budget in BUDGETS:
                selection = asker.select(prompt, SelectionMethod.ATTENTION, scores, budget)
                for num, outcome in asker.outcomes(prompt, selection).items():
                    outcomes[name, budget, num].append(outcome)
    _print_outcomes("rules, on validation questions about brief objects", outcomes)
    return {"prompts": num_prompts, "T": _outcomes_json(outcomes)}


if __name__ == "__main__":
    main()
