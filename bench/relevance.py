"""Which setting of visual relevance tells fact words from filler words best, for one model?

    python -m bench.relevance [--model CHECKPOINT] [--samples 90] [--write]

LVSpec leaves open which layer's hidden states are compared, whether those of the place that predicts a token or of the
one that reads it, and how many visual states are averaged. All are tried on greedy captions of validation videos: the
figure is the area under the ROC curve (AUC) of relevance as a detector of fact words (colours, shapes, sizes, motions,
backgrounds, counts). The best setting is then measured once on held-out videos. `--write` keeps it, and the quantiles
of relevance on the validation captions, in the checkpoint's `foveate.json` and its card.

Hidden states come from transformers, so that the engine's own relevance (tested against it) cannot hide an error here.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from bench.reference import TransformersReference
from bench.report import print_json, print_table, say
from bench.world import Sample, held_out, validation, write_mp4
from bench.world.facts import WORDS_BY_FACT
from engine.relevance import RelevanceSettings
from engine.sampling import Sampling
from foveate.checkpoints import default_checkpoint

FPS = 4.0
FRAME_PAIRS = (8, 24, 48)
NEAREST = (1, 4, 8, 10, 16, 32, 100)
MAX_TOKENS = 160
NUM_QUANTILES = 21
CARD_MARKS = "<!-- relevance: begin -->", "<!-- relevance: end -->"


@dataclass
class Scores:
    """Relevance of the tokens of many answers, by what kind of word they belong to; "filler" for the rest."""

    by_kind: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def facts(self) -> list[float]:
        return [score for kind, scores in self.by_kind.items() if kind != "filler" for score in scores]

    @property
    def all(self) -> list[float]:
        return [score for scores in self.by_kind.values() for score in scores]

    def auc(self, kind: str | None = None) -> float:
        return area_under_curve(self.facts if kind is None else self.by_kind[kind], self.by_kind["filler"])


@dataclass(frozen=True)
class Answer:
    """A greedy answer: the kind of every token, and hidden states [num_layers + 1, tokens, hidden] of the video and of
    the answer, one row before its first token to its last."""

    kinds: list[str]
    visual: Tensor
    states: Tensor


def main() -> None:
    arguments = _parse_arguments()
    torch.set_num_threads(1)
    reference = TransformersReference(arguments.model)
    num_layers = int(reference.model.config.text_config.num_hidden_layers)
    tried = list(_settings(num_layers))
    measured = _measure(reference, validation, tried, arguments.samples)
    best = max(tried, key=lambda one: measured[one].auc())
    _print_grid(measured, num_layers)
    chosen = replace(best, quantiles=_quantiles(measured[best].all))
    told = _measure(reference, held_out, [best], arguments.samples)[best]
    result = _result(best, measured[best], told, arguments)
    rows = [(kind, len(told.by_kind[kind]), told.auc(kind)) for kind in sorted(told.by_kind) if kind != "filler"]
    print_table(
        "held-out, chosen setting", ("kind of word", "tokens", "AUC"), [*rows, ("all", len(told.facts), told.auc())]
    )
    if arguments.write:
        chosen.write(arguments.model)
        _write_card(arguments.model / "README.md", result, rows)
    print_json(result)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_checkpoint())
    parser.add_argument("--samples", type=int, default=90, help="captions of each split")
    parser.add_argument("--write", action="store_true", help="keep the result with the checkpoint")
    return parser.parse_args()


def _settings(num_layers: int) -> Iterator[RelevanceSettings]:
    for layer, at_predicting, is_centred, num_nearest in itertools.product(
        range(num_layers + 1), (True, False), (False, True), NEAREST
    ):
        yield RelevanceSettings(layer, at_predicting, is_centred, num_nearest)


def _measure(
    reference: TransformersReference,
    draw: Callable[..., Sample],
    settings: Sequence[RelevanceSettings],
    num_samples: int,
) -> dict[RelevanceSettings, Scores]:
    scores = {one: Scores() for one in settings}
    for index in range(num_samples):
        sample = draw("caption", index, num_frame_pairs=FRAME_PAIRS[index % len(FRAME_PAIRS)])
        answer = _answer(reference, sample)
        for one in settings:
            for kind, score in zip(answer.kinds, _relevance(one, answer), strict=True):
                scores[one].by_kind[kind].append(score)
        if (index + 1) % 30 == 0:
            say(f"{draw.__name__}: {index + 1}/{num_samples} captions")
    return scores


@torch.inference_mode()
def _answer(reference: TransformersReference, sample: Sample) -> Answer:
    with tempfile.TemporaryDirectory(prefix="foveate-bench-") as folder:
        video = Path(folder) / "video.mp4"
        write_mp4(sample.world, video, fps=FPS)
        prompt = reference.prompt(video, sample.question, fps=FPS)
    token_ids = reference.generate(prompt, max_tokens=MAX_TOKENS, sampling=Sampling()).token_ids
    first = int(prompt.positions.max()) + 1
    places = torch.arange(first, first + len(token_ids)).expand(3, 1, -1)
    fed = torch.cat([prompt.inputs["input_ids"], torch.tensor([token_ids])], dim=1)
    pixels = {name: prompt.inputs[name] for name in ("pixel_values_videos", "video_grid_thw")}
    output = reference.model(
        input_ids=fed,
        position_ids=torch.cat([prompt.positions, places], dim=2),
        use_cache=False,
        output_hidden_states=True,
        **pixels,
    )
    states = torch.stack(output.hidden_states)[:, 0]  # [num_layers + 1, tokens, hidden]
    visual = states[:, fed[0] == reference.model.config.video_token_id]
    return Answer(_kinds(reference, token_ids), visual, states[:, prompt.num_tokens - 1 :])


def _kinds(reference: TransformersReference, token_ids: list[int]) -> list[str]:
    """Returns the kind of fact that each token's word is, or "filler"; a word may be several tokens."""
    pieces = [reference.processor.tokenizer.decode([token_id]) for token_id in token_ids]
    kind_of_word = {word: kind for kind, words in WORDS_BY_FACT.items() for word in words}
    kind_of_place = ["filler"] * len("".join(pieces))
    for word in re.finditer(r"[a-z]+", "".join(pieces).lower()):
        kind_of_place[word.start() : word.end()] = [kind_of_word.get(word.group(), "filler")] * len(word.group())
    kinds, start = [], 0
    for piece in pieces:
        own = [kind for kind in kind_of_place[start : start + len(piece)] if kind != "filler"]
        kinds.append(own[0] if own else "filler")
        start += len(piece)
    return kinds


def _relevance(settings: RelevanceSettings, answer: Answer) -> list[float]:
    states = answer.states[settings.layer]
    rows = states[:-1] if settings.at_predicting else states[1:]
    table = settings.visual_table(answer.visual[settings.layer])
    return [float(score) for score in settings.scores(rows, table, settings.num_nearest)]


def area_under_curve(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """Returns the probability that a positive scores above a negative; a tie counts half."""
    ordered = torch.tensor(sorted(negatives), dtype=torch.float64)
    wanted = torch.tensor(positives, dtype=torch.float64)
    below = torch.searchsorted(ordered, wanted, right=False)
    not_above = torch.searchsorted(ordered, wanted, right=True)
    return float((below + not_above).double().mean() / 2 / len(negatives))


def _quantiles(scores: Sequence[float]) -> tuple[float, ...]:
    places = torch.linspace(0, 1, NUM_QUANTILES, dtype=torch.float64)
    return tuple(round(float(value), 5) for value in torch.quantile(torch.tensor(scores, dtype=torch.float64), places))


def _print_grid(measured: dict[RelevanceSettings, Scores], num_layers: int) -> None:
    for at_predicting, is_centred in itertools.product((True, False), (False, True)):
        rows = []
        for layer in range(num_layers + 1):
            aucs = [measured[RelevanceSettings(layer, at_predicting, is_centred, nearest)].auc() for nearest in NEAREST]
            rows.append((layer, *aucs))
        place, centred = "predicting" if at_predicting else "reading", "centred" if is_centred else "raw"
        print_table(f"AUC on validation, {place} place, {centred}", ("layer", *(f"N={one}" for one in NEAREST)), rows)


def _result(best: RelevanceSettings, tuned: Scores, told: Scores, arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "model": arguments.model.name,
        "samples": arguments.samples,
        "layer": best.layer,
        "at_predicting": best.at_predicting,
        "is_centred": best.is_centred,
        "num_nearest": best.num_nearest,
        "auc_validation": round(tuned.auc(), 4),
        "auc_held_out": round(told.auc(), 4),
        "fact_share_held_out": round(len(told.facts) / len(told.all), 4),
        "auc_by_kind_held_out": {kind: round(told.auc(kind), 4) for kind in sorted(told.by_kind) if kind != "filler"},
    }


def _write_card(card: Path, result: dict[str, object], rows: list[tuple[str, int, float]]) -> None:
    """Puts the result into the checkpoint's card, in place of an earlier one."""
    begin, end = CARD_MARKS
    kinds = "\n".join(f"| {kind} | {number} | {auc:.3f} |" for kind, number, auc in rows)
    place = "the place that predicts a token" if result["at_predicting"] else "the place that reads a token"
    section = f"""{begin}
## Visual relevance

`python -m bench.relevance --samples {result["samples"]} --write`: hidden states of layer {result["layer"]} at {place},
{"mean visual state taken off" if result["is_centred"] else "raw"}, mean of the {result["num_nearest"]} largest cosines.
AUC of fact words against filler words: {result["auc_validation"]} on validation captions (where the setting was
chosen), **{result["auc_held_out"]}** on held-out ones, where {result["fact_share_held_out"]:.1%} of the tokens are fact
words.

| fact words (held-out) | tokens | AUC |
|---|---|---|
{kinds}
{end}
"""
    text = card.read_text() if card.is_file() else ""
    kept = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}\n?", "", text, flags=re.DOTALL).rstrip("\n")
    card.write_text(f"{kept}\n\n{section}" if kept else section)


if __name__ == "__main__":
    main()
