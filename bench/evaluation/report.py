"""The section of the documentation that records become: tables, plots, what holds of the papers' claims."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.evaluation import plots, theory
from bench.evaluation.methods import (
    LVSPEC_DRAFTS,
    PLAIN,
    Method,
    ablations,
    drafter_methods,
    headline_methods,
    measuring,
    other_policies,
)
from bench.evaluation.records import Record, RecordFile
from bench.evaluation.summary import Summary, fact_difference, relevance_auc, summarise
from bench.evaluation.tables import markdown_table, summary_table

CAPTIONS, DESCRIPTIONS, CHOICES = "world-caption", "world-describe", "world-multiple_choice"
_HOLDS = {True: "yes", False: "**no**", None: "not measured"}


def write_report(records: RecordFile, model: str, docs: Path, *, pictures: Path, command: str) -> None:
    """Puts the section of a model pair into `docs`, in place of an earlier one, and its plots into a folder.

    `command` is what made the records. What was not measured is left out.
    """
    pictures.mkdir(parents=True, exist_ok=True)
    pair = model.partition(" (")[0]  # without the fingerprint: new weights replace the section of old ones
    name = re.sub(r"[^a-z0-9]+", "-", pair.lower()).strip("-")
    begin, end = f"<!-- evaluation {name}: begin -->", f"<!-- evaluation {name}: end -->"
    section = f"{begin}\n{_section(list(records), model, pictures, name, docs.parent, command)}\n{end}\n"
    text = docs.read_text() if docs.is_file() else "# Results\n"
    kept = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}\n?", "", text, flags=re.DOTALL).rstrip("\n")
    docs.write_text(f"{kept}\n\n{section}")


def _section(records: Sequence[Record], model: str, folder: Path, name: str, docs: Path, command: str) -> str:
    captions = summarise(records, CAPTIONS, model)
    _draw(captions, folder, name)
    drafters = _names(drafter_methods())
    parts = [
        f"## Drafters and loose acceptance: {model}",
        f"`{command}`, made from {sum(record.model == model for record in records)} kept answers. Tiny models, drawn "
        "videos, a CPU: the papers' models are ten thousand times larger and their videos real. Speed-ups are over "
        "plain decoding of the same items in the same run; facts are scored exactly against the drawn world.",
        _table(
            "### Policies, 10 drafts of the small model",
            captions,
            [PLAIN, *_names(headline_methods()), *_names(other_policies())],
        ),
        _claims(records, captions, model),
        _picture(folder, docs, f"{name}-speed.png", "speed against fidelity"),
        _table("### Drafters, exact acceptance, 9 drafts: captions", captions, drafters),
        _table(
            "### Drafters, exact acceptance, 9 drafts: descriptions of named objects",
            summarise(records, DESCRIPTIONS, model),
            drafters,
        ),
        _picture(folder, docs, f"{name}-positions.png", "acceptance by position in the draft"),
        _table("### LVSpec's parameters", captions, _names(ablations())),
        _theory(records, model, folder, name, docs),
        *_others(records, model),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, summaries: dict[str, Summary], names: Sequence[str]) -> str:
    """Returns a titled table of the methods that were measured; nothing when none was."""
    chosen = _chosen(summaries, names)
    return f"{title}\n\n{summary_table(chosen)}" if chosen else ""


def _names(methods: Iterable[Method]) -> list[str]:
    return [method.name for method in methods]


def _chosen(summaries: dict[str, Summary], names: Sequence[str]) -> list[Summary]:
    return [summaries[name] for name in names if name in summaries]


def _claims(records: Sequence[Record], captions: dict[str, Summary], model: str) -> str:
    """What the papers claim, and what was found; every sentence is made from the figures."""
    if not {"exact", "lvspec", "random"} <= captions.keys():
        return ""
    exact, lvspec, random = captions["exact"], captions["lvspec"], captions["random"]
    own = [record for record in records if record.model == model and record.benchmark == CAPTIONS]
    rate = theory.mismatch_rate([record for record in own if record.method == "exact"], LVSPEC_DRAFTS)
    difference, (low, high) = fact_difference(records, CAPTIONS, model, "lvspec", "random")
    auc = relevance_auc([record for record in own if record.method == measuring().name])
    choices = summarise(records, CHOICES, model)
    are_equal = all(one.equal_share == 1 for one in choices.values()) if choices else None
    gain = lvspec.accepted_per_round / exact.accepted_per_round if exact.accepted_per_round else 0.0
    low_own, high_own = lvspec.fidelity_interval
    rows = [
        (
            "LVSpec's T over the exact policy's",
            "2.27 at a mismatch rate of .21",
            f"{gain:.2f} at {rate:.3f}",
            gain >= 2,
        ),
        (
            "facts under LVSpec, over the target's own",
            ".996 (bar: .99)",
            f"{lvspec.fidelity:.3f} ({low_own:.3f} to {high_own:.3f}, {lvspec.num_items} captions)",
            lvspec.fidelity >= 0.99,
        ),
        (
            "random places relaxed instead: truer or less true than LVSpec, at equal lambda",
            "less",
            f"LVSpec {difference:+.3f} of the facts ({low:+.3f} to {high:+.3f}); "
            f"T {lvspec.accepted_per_round:.2f} against {random.accepted_per_round:.2f}",
            low > 0,
        ),
        (
            "relevance tells fact words from filler (AUC)",
            "bar: .75",
            "" if auc is None else f"{auc:.3f}",
            None if auc is None else auc >= 0.75,
        ),
        ("multiple choice answered as under exact", "yes", {True: "yes", False: "no", None: ""}[are_equal], are_equal),
    ]
    columns = ("claim", "paper or bar", "here", "holds")
    return markdown_table(columns, [(*row[:3], _HOLDS[row[3]]) for row in rows])


def _theory(records: Sequence[Record], model: str, folder: Path, name: str, docs: Path) -> str:
    own = [record for record in records if record.model == model and record.benchmark == CAPTIONS and record.details]
    by_lambda = {
        tenths / 10: [record for record in own if record.method == f"theory {tenths / 10:g}"] for tenths in range(11)
    }
    kept = {lam: [count for one in chosen for count in theory.kept_per_round(one)] for lam, chosen in by_lambda.items()}
    if not all(kept.values()):
        return ""
    rate = theory.rate_of_rounds(kept[0.0], LVSPEC_DRAFTS)
    rounds = [one for record in by_lambda[1.0] for one in theory.rounds_of(record)]
    t = {lam: sum(counts) / len(counts) for lam, counts in kept.items()}
    expected = {lam: theory.expected_t(rate, lam, LVSPEC_DRAFTS) for lam in kept}
    again = {lam: theory.t_of_rounds(rounds, lam) for lam in kept}
    plots.t_against_lambda(t, expected, again, folder / f"{name}-lambda.png")
    rows = [
        (
            f"{lam:g}",
            f"{t[lam]:.2f}",
            f"{expected[lam]:.2f}",
            f"{t[lam] / expected[lam] - 1:+.1%}",
            f"{(1 - lam) * rate:.4f}",
            f"{theory.strict_mismatch_rate(rounds, lam):.4f}",
            f"{again[lam]:.2f}",
        )
        for lam in kept
    ]
    table = markdown_table(
        (
            "lambda",
            "T",
            "sum of (1 - (1 - lambda) e0)^j",
            "deviation",
            "(1 - lambda) e0",
            "strict mismatches, measured",
            "T of the same rounds, cut anew",
        ),
        rows,
    )
    return "\n\n".join(
        (
            "### T by lambda, without guards and shifts",
            f"e0 = {rate:.4f}; T is over rounds that do not end the answer. The formula takes mismatches to be "
            "independent of each other, of their place in the draft and of relevance. The last two columns come from "
            "the rounds of lambda 1, where all were kept: how often a token is a mismatch and strict, and T if each "
            "round were cut at its first such token.",
            table,
            _picture(folder, docs, f"{name}-lambda.png", "T by lambda"),
        )
    )


def _others(records: Sequence[Record], model: str) -> list[str]:
    """Every other benchmark, published ones included."""
    names = sorted({record.benchmark for record in records if record.model == model} - {CAPTIONS})
    parts = []
    for name in names:
        summaries = summarise(records, name, model)
        chosen = _chosen(summaries, [PLAIN, *_names(headline_methods())])
        if chosen:
            parts += [f"### {name}", summary_table(chosen)]
    return parts


def _draw(captions: dict[str, Summary], folder: Path, name: str) -> None:
    policies = _chosen(captions, [*_names(headline_methods()), *_names(other_policies())])
    if policies:
        plots.speed_against_fidelity(policies, folder / f"{name}-speed.png")
    drafters = _chosen(captions, _names(drafter_methods()))
    if drafters:
        plots.acceptance_per_position(drafters, folder / f"{name}-positions.png")


def _picture(folder: Path, docs: Path, file: str, title: str) -> str:
    path = folder / file
    return f"![{title}]({Path(os.path.relpath(path, docs)).as_posix()})" if path.is_file() else ""
