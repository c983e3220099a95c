"""How long are accepted drafts, by how the sparse drafter's visual entries are picked?

    python -m bench.drafting [--prompts 40] [--frame-pairs 96]

Through the three services, on held-out questions that ask to describe objects which are visible for two to four frame
pairs only. Budgets are shares of the visual tokens; every method gets the same number of entries per layer and KV
head. T counts accepted draft tokens per round, without the recovered or bonus token. The ceiling drafts from all
visual entries, the floor from none. Errors are standard errors over prompts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bench.report import mean_and_error, print_json, print_table, say
from bench.world import held_out, write_mp4
from foveate.checkpoints import default_checkpoint
from foveate.client import AnswerStats, Client, Context, DraftMode, Selection
from foveate.stack import Stack, StackConfig

FPS = 4.0
BUDGETS = (0.05, 0.10, 0.25, 0.50)
DRAFT_LENGTHS = (3, 5, 7, 9)
METHODS = (Selection.ATTENTION, Selection.RANDOM, Selection.RECENT)
HEADLINE_DRAFTS = 5

Setting = tuple[str, float, int]  # method, budget, num_draft_tokens


def main() -> None:
    arguments = _parse_arguments()
    stats: dict[Setting, list[AnswerStats]] = defaultdict(list)
    started_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="foveate-bench-") as folder,
        Stack(StackConfig(model=arguments.model)) as stack,
        Client(stack.addresses.gateway) as client,
    ):
        for index in range(arguments.prompts):
            sample = held_out("describe", index, num_frame_pairs=arguments.frame_pairs, brief=True)
            video = Path(folder) / "video.mp4"
            write_mp4(sample.world, video, fps=FPS)
            context = client.create_context(video, fps=FPS)
            for setting in _settings():
                stats[setting].append(_ask(client, context, sample.question, setting))
            client.delete_context(context)
            if (index + 1) % 5 == 0:
                say(f"{index + 1}/{arguments.prompts} prompts, {time.monotonic() - started_s:.0f} s")
    _print_result(stats, num_visual_tokens=context.num_visual_tokens)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--frame-pairs", type=int, default=96)
    parser.add_argument("--model", type=Path, default=default_checkpoint())
    return parser.parse_args()


def _settings() -> list[Setting]:
    swept = [(method.value, budget, drafts) for method in METHODS for budget in BUDGETS for drafts in DRAFT_LENGTHS]
    bounds = [(name, budget, drafts) for name, budget in (("none", 0.0), ("all", 1.0)) for drafts in DRAFT_LENGTHS]
    return [*swept, *bounds]


def _ask(client: Client, context: Context, question: str, setting: Setting) -> AnswerStats:
    method, budget, num_draft_tokens = setting
    answer = client.ask(
        context,
        question,
        max_tokens=96,
        draft=DraftMode.SPARSE,
        num_draft_tokens=num_draft_tokens,
        visual_budget=budget,
        selection=Selection.ATTENTION if method in ("none", "all") else Selection(method),
    )
    if answer.stats.draft_mode != DraftMode.SPARSE:
        raise RuntimeError(f"the drafter was lost: {answer.notes}")
    return answer.stats


def _accepted_per_round(stats: AnswerStats) -> float:
    return stats.num_accepted_tokens / max(1, stats.num_draft_rounds)


def _print_result(stats: dict[Setting, list[AnswerStats]], *, num_visual_tokens: int) -> None:
    num_prompts = len(next(iter(stats.values())))
    say(f"{num_prompts} held-out questions about briefly visible objects, {num_visual_tokens} visual tokens each")
    for drafts in DRAFT_LENGTHS:
        rows = []
        for method in (*(method.value for method in METHODS), "none", "all"):
            budgets = BUDGETS if method not in ("none", "all") else ({"none": 0.0, "all": 1.0}[method],)
            rows += [_row(stats[method, budget, drafts], method, budget) for budget in budgets]
        columns = ("selection", "budget", "T", "± s.e.", "mean acceptance length", "acceptance")
        print_table(f"{drafts} draft tokens per round", columns, rows)
    print_json(
        {
            "prompts": num_prompts,
            "num_visual_tokens": num_visual_tokens,
            "num_draft_tokens": HEADLINE_DRAFTS,
            "T": _nested(stats, HEADLINE_DRAFTS),
            "T_by_num_draft_tokens": {str(drafts): _nested(stats, drafts) for drafts in DRAFT_LENGTHS},
            "attention_minus_random": {
                f"{budget * 100:g}": _paired_difference(stats, budget, HEADLINE_DRAFTS) for budget in BUDGETS
            },
        }
    )


def _row(group: list[AnswerStats], method: str, budget: float) -> tuple[object, ...]:
    mean, error = mean_and_error([_accepted_per_round(one) for one in group])
    drafted = sum(one.num_draft_tokens for one in group)
    accepted = sum(one.num_accepted_tokens for one in group)
    return (method, f"{budget:.0%}", f"{mean:.2f}", f"{error:.2f}", f"{mean + 1:.2f}", f"{accepted / drafted:.3f}")


def _nested(stats: dict[Setting, list[AnswerStats]], drafts: int) -> dict[str, dict[str, float]]:
    nested: dict[str, dict[str, float]] = defaultdict(dict)
    for (method, budget, num_draft_tokens), group in stats.items():
        if num_draft_tokens == drafts:
            mean, _ = mean_and_error([_accepted_per_round(one) for one in group])
            nested[method][f"{budget * 100:g}"] = round(mean, 3)
    return nested


def _paired_difference(stats: dict[Setting, list[AnswerStats]], budget: float, drafts: int) -> dict[str, float]:
    """Attention less random on the same prompts: mean and standard error of the difference in T."""
    attention = stats[Selection.ATTENTION.value, budget, drafts]
    random = stats[Selection.RANDOM.value, budget, drafts]
    differences = [
        _accepted_per_round(one) - _accepted_per_round(other) for one, other in zip(attention, random, strict=True)
    ]
    mean, error = mean_and_error(differences)
    return {"mean": round(mean, 3), "standard_error": round(error, 3)}


if __name__ == "__main__":
    main()
