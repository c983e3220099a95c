"""Every method on every benchmark: how fast, how much accepted, how true.

    python -m bench.evaluate --suite quick                 headline figures, under ten minutes, JSON in the last line
    python -m bench.evaluate --suite full --report         every table and plot; writes docs/results.md's section
    python -m bench.evaluate --suite full --data FOLDER    published benchmarks too, from a folder in their formats

Answers come from the three services. Every record is kept in the runs folder as it comes (one JSON object a line), so
a run that was stopped goes on where it was, and a report is made again without asking anything twice. T counts accepted
draft tokens per round with a draft, without the recovered or bonus token.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.evaluation import theory
from bench.evaluation.datasets import load_all
from bench.evaluation.judge import Judge
from bench.evaluation.methods import (
    LVSPEC_DRAFTS,
    Method,
    ablations,
    drafter_methods,
    headline_methods,
    measuring,
    other_policies,
    theory_methods,
)
from bench.evaluation.records import RecordFile
from bench.evaluation.report import write_report
from bench.evaluation.runs import Job, run
from bench.evaluation.summary import Summary, fact_difference, relevance_auc, summarise
from bench.evaluation.tables import summary_table
from bench.evaluation.world import world_items
from bench.report import print_json, say
from foveate.checkpoints import default_checkpoint, small_checkpoint
from foveate.client import Client
from foveate.stack import Stack, StackConfig

CAPTIONS = "world-caption"
CHOICES = "world-multiple_choice"


@dataclass(frozen=True)
class Sizes:
    """How many items a suite asks about."""

    captions: int
    ablations: int
    drafters: int
    choices: int
    open: int
    measured: int


SIZES = {
    "quick": Sizes(captions=60, ablations=0, drafters=0, choices=20, open=0, measured=30),
    "full": Sizes(captions=320, ablations=60, drafters=60, choices=60, open=60, measured=60),
}


def main() -> None:
    arguments = _parse_arguments()
    records = RecordFile(arguments.runs / "records.jsonl")
    for target, small in arguments.pair or [(default_checkpoint(), small_checkpoint())]:
        config = StackConfig(model=target, small_model=small, num_threads=1, pin=arguments.pin)
        with Stack(config) as stack, Client(stack.addresses.gateway, timeout_s=1800) as client:
            info = client.server_info()
            model = f"{target.name} + {small.name} ({info.model_fingerprint[:8]})"
            say(f"{model}: suite {arguments.suite}")
            run(client, model, list(_jobs(arguments)), records)
        _print_tables(records, model)
        if arguments.report:
            pictures = arguments.docs.parent / "plots"
            write_report(records, model, arguments.docs, pictures=pictures, command=_command(arguments))
        print_json(headline(records, model))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=tuple(SIZES), default="quick")
    parser.add_argument("--runs", type=Path, default=Path("runs/evaluation"), help="where records are kept")
    parser.add_argument("--captions", type=int, default=None, help="captions of the headline, instead of the suite's")
    parser.add_argument("--others", type=int, default=None, help="items of every other table, instead of the suite's")
    parser.add_argument("--split", choices=("held_out", "validation"), default="held_out")
    parser.add_argument("--pair", type=_pair, action="append", help="TARGET,SMALL checkpoints; repeatable")
    parser.add_argument("--data", type=Path, default=None, help="folder with published benchmarks, a subfolder each")
    parser.add_argument("--limit", type=int, default=None, help="questions of each published benchmark")
    parser.add_argument("--judge-url", default=None, help="OpenAI-compatible endpoint that scores open answers")
    parser.add_argument("--judge-model", default="", help="model name at the judge")
    parser.add_argument("--pin", action="store_true", help="verifier and drafter on CPU cores of their own")
    parser.add_argument("--report", action="store_true", help="write the tables and plots into the documentation")
    parser.add_argument("--docs", type=Path, default=Path("docs/results.md"))
    return parser.parse_args()


def _command(arguments: argparse.Namespace) -> str:
    """The command that makes the same records again."""
    chosen = [f"--suite {arguments.suite}"]
    for name in ("captions", "others"):
        value = getattr(arguments, name)
        chosen += [] if value is None else [f"--{name} {value}"]
    return " ".join(("python -m bench.evaluate", *chosen, "--report"))


def _sizes(arguments: argparse.Namespace) -> Sizes:
    sizes = SIZES[arguments.suite]
    if arguments.others is not None:
        number = arguments.others
        sizes = Sizes(sizes.captions, number, number, number, number, sizes.measured)
    return sizes if arguments.captions is None else replace(sizes, captions=arguments.captions)


def _pair(text: str) -> tuple[Path, Path]:
    target, _, small = text.partition(",")
    return Path(target), Path(small)


def _jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    sizes, split = _sizes(arguments), arguments.split
    headline_four = list(headline_methods())

    def world(kind: str, number: int, methods: Iterable[Method]) -> Job:
        return Job(list(world_items(kind, number, split=split)), list(methods))

    yield world("caption", sizes.captions, headline_four)
    yield world("multiple_choice", sizes.choices, headline_four)
    yield world("caption", sizes.measured, [measuring()])
    yield world("describe", sizes.open, headline_four)
    yield world("question", sizes.open, headline_four)
    yield world("describe", sizes.drafters, drafter_methods())
    yield world("caption", sizes.drafters, [*drafter_methods(), *other_policies()])
    yield world("caption", sizes.ablations, [*ablations(), *theory_methods()])
    if arguments.data is not None:
        judge = None if arguments.judge_url is None else Judge(arguments.judge_url, arguments.judge_model)
        for loaded in load_all(arguments.data, limit=arguments.limit, judge=judge):
            say(loaded.describe())
            yield Job(loaded.items, [*headline_four, *drafter_methods()])


def _print_tables(records: RecordFile, model: str) -> None:
    for benchmark in sorted({record.benchmark for record in records if record.model == model}):
        say(f"\n{benchmark}\n")
        print(summary_table(summarise(records, benchmark, model).values()))


def headline(records: RecordFile, model: str) -> dict[str, object]:
    """Returns the figures that matter most, as they are printed in the last line."""
    captions, choices = summarise(records, CAPTIONS, model), summarise(records, CHOICES, model)
    measured = [record for record in records if record.model == model and record.details]
    explained = [record for record in measured if record.method == measuring().name]
    auc = relevance_auc(explained)
    exact = [one for one in records if (one.model, one.benchmark, one.method) == (model, CAPTIONS, "exact")]
    difference, interval = fact_difference(records, CAPTIONS, model, "lvspec", "random")
    named = [method.name for method in headline_methods() if method.name in captions]
    result: dict[str, object] = {name: _figures(captions[name]) for name in named}
    return result | {
        "auc": None if auc is None else round(auc, 4),
        "multiple_choice_equal": all(choices[name].equal_share == 1 for name in choices),
        "mismatch_rate": round(theory.mismatch_rate(exact, LVSPEC_DRAFTS), 4),
        "lvspec_less_random_facts": {"mean": round(difference, 4), "interval": _rounded(interval)},
        "captions": captions["exact"].num_items if "exact" in captions else 0,
        "model": model,
    }


def _figures(one: Summary) -> dict[str, object]:
    return {
        "T": round(one.accepted_per_round, 3),
        "facts": round(one.facts, 4),
        "facts_over_targets_own": round(one.fidelity, 4),
        "facts_over_targets_own_interval": _rounded(one.fidelity_interval),
        "speedup": round(one.decode_speedup, 3),
        "end_to_end_speedup": round(one.end_to_end_speedup, 3),
        "loose_share": round(one.loose_share, 4),
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


if __name__ == "__main__":
    main()
