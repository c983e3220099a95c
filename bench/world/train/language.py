"""Stage B: the whole model learns to answer, from the vision stage's tower or from a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.world.answerer import Answerer, TransformersBackend
from bench.world.evaluate import TRAINING_TASKS, draw_samples, evaluate, task_name
from bench.world.facts import BACKGROUNDS, COLORS
from bench.world.families import WorldFamily
from bench.world.model import MODEL_SIZES, VOCAB_SIZE
from bench.world.train.branches import BranchPacker, fact_token_ids
from bench.world.train.curriculum import lesson, samples
from bench.world.train.drills import DRILLS, drill_batch
from bench.world.train.guidance import Guide, Links
from bench.world.train.learner import LEARNING_RATE, Batch, Learner
from bench.world.train.pixels import cell_labels, video_frames, without_first_motion
from bench.world.train.run import Run, Schedule, cosine
from bench.world.train.vision import batch_equal_segments
from bench.world.wording import spoken_by

FACT_WEIGHT = 3.0
# Letters, yes and no rest on several steps, of which they alone tell; backgrounds are the fact that captions miss most.
WEAK_WEIGHT = 6.0
WATCHED = {"letter": ("A", "B", "C", "D"), "yes_no": ("Yes", "No", "yes", "no"), "background": BACKGROUNDS}
GUIDE_WEIGHT = 0.3
NAMING_WEIGHT = 0.3
LOOKING_WEIGHT = 0.1
WORDS_WEIGHT = 0.05
FINISHING_FROM = 0.6  # share of the schedule after which whole descriptions are asked for more often
DRILL_WEIGHT = 1.0
DRILL_TOKENS = 700
VIDEO_EVERY = 6  # of the first steps, which are drills, so that what is known is kept
LABEL_LOSS_WEIGHT = 0.1
MOTION_LABEL_LOSS_WEIGHT = 0.3  # where motion is seen by the text model alone
HIDE_EMPTY_SHARE = 0.2  # of rows, whose text cannot look at cells without things: facts bind to cells that show them
CHECKPOINT_EVERY_S = 600.0
LOG_EVERY = 25
AVERAGED_STEPS = 50
VALIDATED_PAIRS = 16


@dataclass(frozen=True)
class Settings:
    """How the language stage goes, beside its schedule."""

    config: str = "target"
    init: Path | None = None
    vision: Path | None = None
    device: str = "cpu"
    learning_rate: float = LEARNING_RATE
    turning_share: float = 0.0  # above 0, events are asked about too
    speaker: int | None = None  # whose habits of wording are learned
    drills_first: int = 0  # steps that are drills, but for every VIDEO_EVERY-th
    curriculum_from: float = 0.0  # a model that knows much already need not begin with the easiest lessons
    validate_every: int | None = None  # steps
    num_validated: int = 8  # samples of each kind
    compiled: bool = True


def make_batch(run: Run, packer: BranchPacker, family: WorldFamily, settings: Settings) -> Batch:
    progress = settings.curriculum_from + (1 - settings.curriculum_from) * run.progress()
    now = lesson(run.rng, progress, usual_intervals=family.usual_intervals, turning_share=settings.turning_share)
    with_events = settings.turning_share > 0
    is_finishing = run.progress() > FINISHING_FROM
    asked = 1 + now.is_long  # a long video is costly to read, so more is asked about it
    branches = [
        [
            packer.branch(turns)
            for _ in range(asked)
            for turns in samples(run.rng, world, with_events=with_events, is_finishing=is_finishing)
        ]
        for world in now.worlds
    ]
    rows = packer.rows(branches, num_pairs=now.num_pairs, interval=now.interval)
    by_world = [cell_labels(world) for world in now.worlds]
    if not family.sees_motion:
        by_world = [without_first_motion(world, labels) for world, labels in zip(now.worlds, by_world, strict=True)]
    labels = torch.from_numpy(np.stack(by_world))  # [num_rows, num_pairs, 9, 5]
    for row in range(len(now.worlds)):
        if run.rng.random() < HIDE_EMPTY_SHARE:
            packer.hide(rows, row, (labels[row, :, :, 0] == len(COLORS)).flatten())
    device = settings.device
    patches = torch.cat([family.patches(video_frames(world, run.rng)) for world in now.worlds]).to(device)
    return Batch(patches, now.num_pairs, rows.to(device), labels.flatten(0, 2).to(device), now.is_long)


def _is_one_of(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> Tensor:
    """Whether a token is one of these words, with or without a space before it: [VOCAB_SIZE]."""
    out = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    encoded = [tokenizer(form)["input_ids"] for word in words for form in (word, f" {word}")]
    out[[ids[0] for ids in encoded if len(ids) == 1]] = True
    return out


class Averages:
    """Running means of the losses, for the curve."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, value) * (1 - 1 / AVERAGED_STEPS) + value / AVERAGED_STEPS


def save_checkpoint(model: Any, processor: Any, folder: Path) -> None:
    """A bf16 copy that the Auto classes load; the model in training is left as it is."""
    cast: dict[int, Tensor] = {}  # by address, so that tied weights stay one and are saved once
    state = {
        name: cast.setdefault(value.data_ptr(), value.detach().to(torch.bfloat16))
        for name, value in model.state_dict().items()
    }
    model.save_pretrained(folder, state_dict=state)
    processor.save_pretrained(folder)


def token_weights(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Weight of each target token in the loss: [VOCAB_SIZE]."""
    weights = torch.ones(VOCAB_SIZE)
    weights[fact_token_ids(tokenizer)] = FACT_WEIGHT
    for words in WATCHED.values():
        weights[_is_one_of(tokenizer, words)] = WEAK_WEIGHT
    return weights


def export(run_folder: Path, family: WorldFamily, *, config: str, checkpoint: Path) -> None:
    """The model of a language run as it stands at its last save."""
    model = family.build_model(MODEL_SIZES[config])
    state = torch.load(run_folder / "state.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    save_checkpoint(model, family.build_processor(), checkpoint)


def train_language(
    out: Path,
    family: WorldFamily,
    settings: Settings,
    *,
    checkpoint: Path | None,
    schedule: Schedule,
    seed: int,
    resume_at: float | None = None,
) -> None:
    batch_equal_segments()
    run = Run(out, schedule=schedule, seed=seed)
    learner = Learner(
        family,
        config=settings.config,
        init=settings.init,
        vision=settings.vision,
        device=settings.device,
        learning_rate=settings.learning_rate,
    )
    run.resume(learner.parts, at=resume_at)
    with spoken_by(settings.speaker):
        _Training(run, learner, settings, checkpoint or out / "model").run_to_its_end()


class _Training:
    def __init__(self, run: Run, learner: Learner, settings: Settings, checkpoint: Path) -> None:
        self._run, self._learner, self._settings = run, learner, settings
        self._family, self._checkpoint = learner.family, checkpoint
        self._processor = learner.family.build_processor()
        self._packer = BranchPacker(self._processor.tokenizer, learner.family)
        self._links = Links(self._processor.tokenizer)
        self._guide = Guide(learner.model.model.language_model)
        self._by_token = token_weights(self._processor.tokenizer).to(settings.device)
        self._watched = {
            name: _is_one_of(self._processor.tokenizer, words).to(settings.device) for name, words in WATCHED.items()
        }

    def run_to_its_end(self) -> None:
        run = self._run
        if self._settings.compiled:
            self._learner.compile()
            self._warm_up()
        run.start()
        averages, saved_at = Averages(), run.clock.elapsed_s()
        while run.progress() < 1:
            averages.add(**self._step())
            if run.step % LOG_EVERY == 0:
                run.log(**averages.values)
            if self._settings.validate_every and run.step % self._settings.validate_every == 0:
                self._validate()
            if run.save_due():
                run.save(self._learner.parts)
            if run.clock.elapsed_s() - saved_at > CHECKPOINT_EVERY_S:
                self._save_checkpoint()
                saved_at = run.clock.elapsed_s()
        run.save(self._learner.parts)
        self._save_checkpoint()

    def _step(self) -> dict[str, float]:
        """Learn from one batch of videos or drills or both; returns its losses."""
        run, learner = self._run, self._learner
        learner.set_rate(cosine(run.progress(), step=run.step, warmup_steps=60))
        loss, values = self._drill()
        if run.step >= self._settings.drills_first or run.step % VIDEO_EVERY == 0:
            of_videos, more = self._videos()
            loss, values = loss + of_videos, values | more
        learner.learn(loss)
        run.step += 1
        return values

    def _videos(self) -> tuple[Tensor, dict[str, float]]:
        run, learner = self._run, self._learner
        batch = make_batch(run, self._packer, self._family, self._settings)
        targets, losses, of_labels, of_words = learner.forward(batch)
        weights = self._by_token[targets]
        fact = weights > 1
        labels_weight = LABEL_LOSS_WEIGHT if self._family.sees_motion else MOTION_LABEL_LOSS_WEIGHT
        loss = (losses * weights).sum() / weights.sum() + labels_weight * of_labels + WORDS_WEIGHT * of_words
        run.num_videos += batch.num_rows
        losses = losses.detach()
        values = {"fact": float(losses[fact].mean()), "filler": float(losses[~fact].mean())}
        for name, chosen in self._watched.items():
            if bool((of_kind := chosen[targets]).any()):
                values[name] = float(losses[of_kind].mean())
        if not batch.is_long:
            to_letter, to_option = self._guide.loss(batch.rows.links, batch.rows.mask[:, 0])
            loss = loss + GUIDE_WEIGHT * (to_letter + to_option)
            values |= {"labels": float(of_labels.detach()), "to_option": float(to_option.detach())}
            values["words"] = float(of_words.detach())
            if len(batch.rows.names):
                naming = self._guide.naming(batch.rows.names)
                loss = loss + NAMING_WEIGHT * naming
                values["naming"] = float(naming.detach())
            if len(batch.rows.looks):
                looking = self._guide.looking(batch.rows.looks, batch.rows.shown, batch.rows.mask[:, 0])
                loss = loss + LOOKING_WEIGHT * looking
                values["looking"] = float(looking.detach())
        return loss, values

    def _drill(self) -> tuple[Tensor, dict[str, float]]:
        """Drills of one kind at a time, in turn."""
        run, learner = self._run, self._learner
        kind = tuple(DRILLS)[run.step % len(DRILLS)]
        batch = drill_batch(run.rng, self._processor.tokenizer, self._links, kind, num_tokens=DRILL_TOKENS)
        losses = learner.forward_text(batch.input_ids.to(self._settings.device), batch.targets)
        to_letter, to_option = self._guide.loss(batch.links.to(self._settings.device))
        loss = DRILL_WEIGHT * losses.mean() + GUIDE_WEIGHT * (to_letter + to_option)
        return loss, {f"drill {kind}": float(losses.detach().mean())}

    def _validate(self) -> None:
        """Facts of answers to validation samples, through files, to the curve."""
        model = self._learner.model.eval()
        answerer = Answerer(model, self._processor, self._family, TransformersBackend(model, self._family))
        with self._learner.not_compiled():
            for task in TRAINING_TASKS:
                samples = draw_samples("validation", task, VALIDATED_PAIRS, self._settings.num_validated)
                summary = evaluate(answerer, samples)
                self._run.log(**{f"validation {task_name(*task)}": float(str(summary["facts"]))})
        model.train()

    def _save_checkpoint(self) -> None:
        save_checkpoint(self._learner.model, self._processor, self._checkpoint)

    def _warm_up(self) -> None:
        """Compile outside of the time budget, on two batches of different lengths."""
        run, learner = self._run, self._learner
        rng_state = run.rng.getstate()
        for _ in range(2):
            _, losses, _, _ = learner.forward(make_batch(run, self._packer, self._family, self._settings))
            torch.autograd.backward(losses.sum())
        learner.optimizer.zero_grad(set_to_none=True)
        run.rng.setstate(rng_state)
