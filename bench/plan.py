"""Which way of decoding pays, and how much? Predicted from costs, and checked against this machine.

    python -m bench.plan                     # measures costs here, predicts, measures what was predicted
    python -m bench.plan --only-predict      # only the tables of known models on known devices

Here: answers about a held-out video are drafted with 2 and with 12 tokens, one core for the verifier and one for the
drafter; from their device times and acceptance follow the speeds of plain decoding and of 5 and 9 draft tokens, which
are then measured, and the error is said. Overlapped speeds are predictions: nothing here drafts while it verifies yet.

Known models: 16-bit text models of the Qwen2.5-VL sizes on the devices of public data sheets, a roofline at 0.7 of the
peaks. No such machine was measured. Sparse-to-Dense drafts with the target's own weights, so a draft step reads them
all; LVSpec drafts with a smaller model, and keeps more of its drafts. Acceptance is assumed, and said in the table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.long_videos import FPS, answer_len, num_frame_pairs, questions_about, stack_config
from bench.planning.costs import DEVICES, MODELS, Costs, Device, Line, Model, roofline, step_ms
from bench.planning.rounds import answers_ms, best_in_turn, best_overlapped, plain_ms
from bench.report import CoreLoad, print_json, print_table, say
from bench.world import held_out, write_mp4
from foveate.checkpoints import default_checkpoint
from foveate.client import Answer, AnswerStats, Client, Context, DraftMode
from foveate.stack import Stack

MAX_TOKENS = 64
LEARNED_FROM, PREDICTED = (2, 12), (5, 9)
PAIRS = (("7B", "3B"), ("32B", "7B"), ("72B", "7B"))
GPU_CONTEXTS = (16_384, 65_536, 131_072)
GPU_OVERHEAD_MS = 1.5  # per drafted round: what bench.speed is to reach
STD_ACCEPTANCE, LVSPEC_ACCEPTANCE, BUDGET = 0.85, 0.93, 0.05


@dataclass(frozen=True)
class Measured:
    """Answers decoded one way."""

    ms_per_token: float
    stats: list[AnswerStats]
    answer_lens: list[int]  # the token that ended an answer counts


def main() -> None:
    arguments = _parse_arguments()
    values: dict[str, object] = {"known": _print_known()}
    if not arguments.only_predict:
        values["here"] = _here(arguments)
    print_json(values)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visual-tokens", type=int, nargs="+", default=[4096, 16384], help="context lengths here")
    parser.add_argument("--questions", type=int, default=3, help="questions per video")
    parser.add_argument("--repeats", type=int, default=3, help="how often each is answered each way")
    parser.add_argument("--model", type=Path, default=default_checkpoint())
    parser.add_argument("--only-predict", action="store_true", help="measure nothing")
    return parser.parse_args()


def _here(arguments: argparse.Namespace) -> dict[str, object]:
    config = stack_config(arguments.model, pin=True)
    load, table, values = CoreLoad(), [], dict[str, object]()
    with (
        tempfile.TemporaryDirectory(prefix="foveate-bench-") as folder,
        Stack(config) as stack,
        Client(stack.addresses.gateway, timeout_s=3600) as client,
    ):
        for num_visual in arguments.visual_tokens:
            sample = held_out("describe", 0, num_frame_pairs=num_frame_pairs(num_visual), brief=True)
            write_mp4(sample.world, Path(folder) / "video.mp4", fps=FPS)
            context = client.create_context(Path(folder) / "video.mp4", fps=FPS)
            load.percent_per_core()
            by_length = _decode(client, context, questions_about(sample, arguments.questions), arguments.repeats)
            say(f"{context.num_visual_tokens}: busy share of each core in percent: {load.percent_per_core()}")
            costs, acceptance = learned(by_length)
            errors, cells = [], dict[str, object]()
            for length in (0, *PREDICTED):
                one = by_length[length]
                predicted, measured = (
                    answers_ms(costs, acceptance, length, answer_lens=one.answer_lens, max_tokens=MAX_TOKENS),
                    one.ms_per_token,
                )
                errors.append(abs(predicted / measured - 1))
                table.append((context.num_visual_tokens, length, measured, predicted, predicted / measured - 1))
                cells[str(length)] = {"measured_ms": round(measured, 3), "predicted_ms": round(predicted, 3)}
            in_turn, overlapped = best_in_turn(costs, acceptance), best_overlapped(costs, acceptance)
            say(
                f"{context.num_visual_tokens}: best in turn {in_turn.num_draft_tokens} draft tokens, "
                f"{plain_ms(costs) / in_turn.ms_per_token:.2f}x plain; overlapped (predicted) "
                f"{overlapped.num_draft_tokens}, {plain_ms(costs) / overlapped.ms_per_token:.2f}x"
            )
            values[str(context.num_visual_tokens)] = {
                **cells,
                "largest_error": round(max(errors), 3),
                "best_in_turn": in_turn.num_draft_tokens,
                "in_turn_vs_plain": round(plain_ms(costs) / in_turn.ms_per_token, 3),
                "best_overlapped": overlapped.num_draft_tokens,
                "overlapped_vs_plain": round(plain_ms(costs) / overlapped.ms_per_token, 3),
            }
            client.delete_context(context)
    columns = ("visual tokens", "draft tokens", "measured ms/token", "predicted", "error")
    print_table("predicted from 2 and 12 draft tokens", columns, table)
    return values


def _decode(client: Client, context: Context, questions: Sequence[str], repeats: int) -> dict[int, Measured]:
    """Returns what every draft length gave; lengths take turns, so that a slow minute is everybody's."""
    spent: dict[int, list[Answer]] = {length: [] for length in (0, *LEARNED_FROM, *PREDICTED)}
    for repeat in range(repeats + 1):
        for text in questions:
            for length, answers in spent.items():
                how = {"draft": DraftMode.OFF} if length == 0 else {"num_draft_tokens": length}
                answer = client.ask(context, text, max_tokens=MAX_TOKENS, **how)
                if repeat:  # the first time warms up
                    answers.append(answer)
    return {length: _measured(answers) for length, answers in spent.items()}


def _measured(answers: Sequence[Answer]) -> Measured:
    lens = [answer_len(one) for one in answers]
    decode_ms = sum(one.stats.decode_ms for one in answers)
    return Measured(decode_ms / max(1, sum(lens) - len(lens)), [one.stats for one in answers], lens)


def learned(by_length: dict[int, Measured]) -> tuple[Costs, tuple[float, ...]]:
    """Returns costs and acceptance by place, from plain decoding and the lengths that are learned from."""
    verify, draft, overhead = [(0.0, _per_round(by_length[0].stats, "verify_ms"))], [], []
    for length in LEARNED_FROM:
        stats = by_length[length].stats
        verify.append((length, _per_round(stats, "verify_ms")))
        draft.append((length, _per_round(stats, "draft_ms")))
        overhead += [value for one in stats for value in one.round_overhead_ms]
    longest = by_length[max(LEARNED_FROM)].stats
    per_place = [sum(place) for place in zip(*(_padded(one) for one in longest), strict=True)]
    reached = [sum(one.num_draft_rounds for one in longest), *per_place]
    # Where less than a fifth of the drafts came, most ended with their answer rather than with a mismatch.
    acceptance = tuple(
        here / before for before, here in zip(reached, per_place, strict=False) if before > reached[0] / 5
    )
    plain = [value for one in by_length[0].stats for value in one.round_overhead_ms]
    costs = Costs(Line.through(draft), Line.through(verify), statistics.fmean(overhead), statistics.fmean(plain))
    return costs, acceptance


def _per_round(stats: Sequence[AnswerStats], name: str) -> float:
    return sum(float(getattr(one, name)) for one in stats) / max(1, sum(one.num_rounds for one in stats))


def _padded(stats: AnswerStats) -> list[int]:
    per_place = list(stats.num_accepted_tokens_per_pos)
    return per_place + [0] * (max(LEARNED_FROM) - len(per_place))


def _print_known() -> list[dict[str, object]]:
    by_name = {model.name: model for model in MODELS}
    table, values = [], list[dict[str, object]]()
    for device in DEVICES:
        for target, drafter in PAIRS:
            for num_tokens in GPU_CONTEXTS:
                row = known(by_name[target], by_name[drafter], device, num_tokens)
                values.append(row)
                table.append(tuple(row.values()))
    say(
        f"PREDICTIONS from data sheets, nothing measured. Acceptance {STD_ACCEPTANCE} (sparse, {BUDGET:.0%} of the "
        f"tokens), {LVSPEC_ACCEPTANCE} (loose, smaller model); {GPU_OVERHEAD_MS} ms between; one answer at a time"
    )
    columns = ("pair", "context", "plain ms", "both", "StD", "StD ov.", "LVSpec", "LVSpec ov.", "best")
    title = "predicted speed-up over plain on one device (both: two for the target; ov.: overlapped)"
    print_table(title, columns, table)
    return values


def known(target: Model, drafter: Model, device: Device, num_tokens: int) -> dict[str, object]:
    """Returns the predicted speed-ups of a pair on two devices of a kind."""
    std = roofline(target, target, device, num_tokens=num_tokens, budget=BUDGET, overhead_ms=GPU_OVERHEAD_MS)
    small = roofline(target, drafter, device, num_tokens=num_tokens, budget=BUDGET, overhead_ms=GPU_OVERHEAD_MS)
    plain = plain_ms(std)
    both = step_ms(target, device, num_rows=1, num_tokens=num_tokens, num_devices=1.8) + std.plain_overhead
    speeds = {
        "both_to_target": plain / both,
        "std": plain / best_in_turn(std, (STD_ACCEPTANCE,)).ms_per_token,
        "std_overlap": plain / best_overlapped(std, (STD_ACCEPTANCE,)).ms_per_token,
        "lvspec": plain / best_in_turn(small, (LVSPEC_ACCEPTANCE,)).ms_per_token,
        "lvspec_overlap": plain / best_overlapped(small, (LVSPEC_ACCEPTANCE,)).ms_per_token,
    }
    return {
        "pair": f"{device.name}: {target.name} + {drafter.name}",
        "num_tokens": num_tokens,
        "plain_ms": round(plain, 2),
        **{name: round(value, 2) for name, value in speeds.items()},
        "best": max(speeds, key=lambda name: speeds[name]),
    }


if __name__ == "__main__":
    main()
