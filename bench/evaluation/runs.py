"""Asks every method about every item, through the three services; what a file has already is not asked again."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.evaluation.items import Item
from bench.evaluation.methods import PLAIN, Method, plain
from bench.evaluation.records import Record, RecordFile
from foveate.client import Answer, Client, Context, DraftMode


@dataclass(frozen=True)
class Job:
    """Methods to try on items."""

    items: Sequence[Item]
    methods: Sequence[Method]


def run(client: Client, model: str, jobs: Iterable[Job], records: RecordFile) -> None:
    """Adds what is missing to `records`. Plain decoding comes first for every item: it is what others are held to."""
    planned = [(item, [plain(), *job.methods]) for job in jobs for item in job.items]
    total = sum(len(methods) for _, methods in planned)
    with _bar() as bar:
        task = bar.add_task("answers", total=total)
        for item, methods in planned:
            missing = [one for one in methods if records.get((model, item.benchmark, item.id, one.name)) is None]
            bar.advance(task, len(methods) - len(missing))
            if missing:
                records.add(_ask_all(client, model, item, missing, records))
                bar.advance(task, len(missing))


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)
    )


def _ask_all(client: Client, model: str, item: Item, methods: list[Method], records: RecordFile) -> Iterable[Record]:
    with tempfile.TemporaryDirectory(prefix="foveate-bench-") as folder:
        path = item.video(Path(folder))
        context = client.create_context(path, fps=item.fps, max_frames=item.max_frames)
    own = records.get((model, item.benchmark, item.id, PLAIN))
    made = []
    # Plain first; the others in an order of the item's own, so that none always runs on a warmer machine.
    rest = [method for method in methods if method.name != PLAIN]
    random.Random(item.id).shuffle(rest)
    for method in [*(one for one in methods if one.name == PLAIN), *rest]:
        record = _ask(client, model, item, method, context, own)
        own = record if method.name == PLAIN else own
        made.append(record)
    client.delete_context(context)
    return made


def _ask(client: Client, model: str, item: Item, method: Method, context: Context, own: Record | None) -> Record:
    started_s = time.perf_counter()
    answer = client.ask(context, item.question, max_tokens=item.max_tokens, **method.options())
    ask_ms = (time.perf_counter() - started_s) * 1e3
    _check_mode(answer, method)
    marks = item.scorer.score(answer.text)
    timings = context.timings
    return Record(
        model=model,
        benchmark=item.benchmark,
        item=item.id,
        method=method.name,
        text=answer.text,
        num_tokens=answer.num_output_tokens,
        num_visual_tokens=context.num_visual_tokens,
        num_rounds=answer.stats.num_rounds,
        num_draft_rounds=answer.stats.num_draft_rounds,
        num_draft_tokens=answer.stats.num_draft_tokens,
        accepted_per_pos=list(answer.stats.num_accepted_tokens_per_pos),
        num_loose=answer.stats.num_loose_tokens,
        num_salvaged=answer.stats.num_salvaged_tokens,
        decode_ms=answer.stats.decode_ms,
        ask_ms=ask_ms,
        context_ms=timings.decode_ms + timings.encode_ms + timings.prefill_ms,
        marks_right=0.0 if marks is None else marks.right,
        marks_total=0 if marks is None else marks.total,
        agreement=1.0 if own is None else item.scorer.agreement(answer.text, own.text),
        is_equal_to_plain=own is None or answer.text == own.text,
        draft_mode="" if answer.stats.draft_mode is None else answer.stats.draft_mode.value,
        details=_details(answer) if method.explain else {},
    )


def _check_mode(answer: Answer, method: Method) -> None:
    if answer.stats.draft_mode is not method.draft and method.draft is not DraftMode.NGRAM:
        raise RuntimeError(f"{method.name}: asked for {method.draft.value} drafts, got others: {answer.notes}")


def _details(answer: Answer) -> dict[str, list[object]]:
    return {
        "texts": list(answer.token_texts),
        "origins": [origin.value for origin in answer.origins],
        "rounds": [detail.round for detail in answer.details],
        "relevance": [detail.relevance for detail in answer.details],
    }
