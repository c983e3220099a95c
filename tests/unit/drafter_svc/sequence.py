"""A verifier's sequence made with the engine alone: prefilled, selected, and verified round by round."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.adjusting import Adjuster
from engine.attention import KvView
from engine.handle_proto import handle_to_proto, selection_to_proto, slab_to_proto, tensor_to_proto
from engine.kv_pool import KvPool, SelectionSlab, Slab, TensorSlab
from engine.loading import LoadedModel
from engine.positions import text_positions
from engine.preprocessing import patches_digest
from engine.runner import TextRunner
from engine.sampling import Sampling, choose
from engine.selection import SelectionMethod, select
from foveate.v1 import answers_pb2, drafter_pb2, kv_pb2, sampling_pb2
from tests.kernels import KERNEL_CACHE

NUM_BEFORE, NUM_VISUAL, NUM_AFTER, NUM_QUESTION = 6, 80, 3, 14
MAX_TOKENS = 40
GRID = (5, 8, 8)
SECOND_PER_GRID = 2.0


@dataclass
class Sequence:
    """The verifier's side of one answer; `tokens` are the answer's, the last of them without KV."""

    runner: TextRunner
    pool: KvPool
    context: Slab
    thread: Slab
    selection: SelectionSlab
    delta: int
    sampling: Sampling
    prompt: tuple[int, ...]  # of context and question
    patches: TensorSlab
    digest: str
    tokens: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)  # the answer's tokens that have rows, drafts included
    num_context_tokens: int = NUM_BEFORE + NUM_VISUAL + NUM_AFTER
    num_prompt_tokens: int = NUM_BEFORE + NUM_VISUAL + NUM_AFTER + NUM_QUESTION

    def view(self, thread_len: int) -> KvView:
        return KvView(self.pool.views(self.context), self.pool.views(self.thread), thread_len)

    def open_message(self, **changes: object) -> drafter_pb2.OpenDraft:
        sampling = sampling_pb2.SamplingParams(temperature=self.sampling.temperature, seed=self.sampling.seed)
        if (asked := self.sampling.adjustments) is not None:
            sampling.repetition_penalty = asked.repetition_penalty
            sampling.presence_penalty = asked.presence_penalty
            sampling.frequency_penalty = asked.frequency_penalty
            sampling.logit_bias.update(dict(asked.logit_bias))
            sampling.min_tokens = asked.min_tokens
        message = drafter_pb2.OpenDraft(
            sequence_id="s1",
            kv_handle=handle_to_proto(self.pool.handle),
            context=slab_to_proto(self.context),
            thread=slab_to_proto(self.thread),
            selection=selection_to_proto(self.selection),
            num_context_tokens=self.num_context_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            visual_spans=[kv_pb2.VisualSpan(start=NUM_BEFORE, num_tokens=NUM_VISUAL)],
            position_delta=self.delta,
            sampling=sampling,
            max_tokens=MAX_TOKENS,
            penalized_token_ids=sorted(set(self.prompt)),
        )
        for name, value in changes.items():
            setattr(message, name, value)
        return message

    def small_message(self, **changes: object) -> drafter_pb2.OpenDraft:
        """Opens the sequence for a small model."""
        message = self.open_message(mode=answers_pb2.DRAFT_MODE_SMALL)
        text = self.prompt[:NUM_BEFORE] + self.prompt[NUM_BEFORE + NUM_VISUAL : self.num_context_tokens]
        video = kv_pb2.VideoSource(
            context="contexts/toy",
            patches=tensor_to_proto(self.patches),
            grid_time=GRID[0],
            grid_rows=GRID[1],
            grid_columns=GRID[2],
            second_per_grid=SECOND_PER_GRID,
            patches_digest=self.digest,
            text_token_ids=text,
        )
        for name, value in changes.items():
            setattr(video, name, value)
        message.video.CopyFrom(video)
        message.prompt_token_ids.extend(self.prompt[self.num_context_tokens :])
        return message

    def verify(self, base_len: int, token_ids: list[int], draft_ids: list[int]) -> list[int]:
        """Writes the rows of token_ids and drafts into the thread and returns the target's choices."""
        fed = [*token_ids, *draft_ids]
        kv = self.view(base_len - self.num_context_tokens)
        hidden = self.runner.forward(token_ids=fed, positions=text_positions(base_len + self.delta, len(fed)), kv=kv)
        logits = self.runner.logits(hidden[len(token_ids) - 1 :])
        answer_len = base_len + len(token_ids) - self.num_prompt_tokens
        self.fed[base_len - self.num_prompt_tokens :] = fed
        return choose(self.adjusted(logits, self.fed[:answer_len], draft_ids), base_len + len(token_ids), self.sampling)

    def adjusted(self, logits: torch.Tensor, answer: list[int], draft_ids: list[int]) -> torch.Tensor:
        if self.sampling.adjustments is None:
            return logits
        adjuster = Adjuster(
            self.sampling.adjustments, prompt_token_ids=self.prompt, eos_token_ids=self.runner.eos_token_ids
        )
        return adjuster.adjusted(logits, answer, draft_ids)


def make_sequence(
    loaded: LoadedModel,
    pool: KvPool,
    *,
    num_selected: int = NUM_VISUAL,
    sampling: Sampling | None = None,
    method: SelectionMethod = SelectionMethod.RANDOM,
) -> Sequence:
    """Prefills a context of a random video and a question, and chooses the first token."""
    runner = TextRunner(loaded, kernel_cache=KERNEL_CACHE)
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(8, 260, (NUM_BEFORE + NUM_AFTER + NUM_QUESTION,), generator=generator).tolist()
    patches = torch.randn(GRID[0] * GRID[1] * GRID[2], 3 * 2 * 8 * 8, generator=generator)
    video = [loaded.family.video_token_id] * NUM_VISUAL
    prompt = [*words[:NUM_BEFORE], *video, *words[NUM_BEFORE:]]
    positions = loaded.family.positions(prompt, [GRID], [SECOND_PER_GRID])
    num_context = NUM_BEFORE + NUM_VISUAL + NUM_AFTER
    context = pool.allocate(num_context)
    thread = pool.allocate(NUM_QUESTION + MAX_TOKENS + 16)
    chosen = pool.allocate_selection(num_selected)
    visual_index = torch.arange(NUM_BEFORE, NUM_BEFORE + NUM_VISUAL)
    pool.selection_view(chosen).copy_(
        select(
            method,
            None,
            visual_index=visual_index,
            num_selected=num_selected,
            layout=loaded.layout,
            generator=generator,
        )
    )
    embeds = runner.embed(prompt).clone()
    kept = pool.allocate_tensor(tuple(patches.shape), patches.dtype)
    pool.tensor_view(kept).copy_(patches)
    embeds[visual_index] = loaded.family.encode_video(loaded.model, patches, torch.tensor([GRID]))
    runner.forward(
        embeds=embeds[:num_context],
        positions=positions.ids[:, :num_context],
        kv=KvView(None, pool.views(context), 0),
    )
    sequence = Sequence(
        runner,
        pool,
        context,
        thread,
        chosen,
        positions.next_position - len(prompt),
        sampling or Sampling(),
        tuple(prompt),
        kept,
        patches_digest(loaded.family.frames(loaded.processor.video_processor)),
    )
    hidden = runner.forward(embeds=embeds[num_context:], positions=positions.ids[:, num_context:], kv=sequence.view(0))
    first = sequence.adjusted(runner.logits(hidden[-1:]), [], [])
    sequence.tokens = choose(first, len(prompt), sequence.sampling)
    return sequence


def plain_answer(loaded: LoadedModel, pool: KvPool, sampling: Sampling, num_tokens: int) -> list[int]:
    """The same answer by plain decoding, in slabs of its own."""
    sequence = make_sequence(loaded, pool, sampling=sampling)
    while len(sequence.tokens) < num_tokens:
        base_len = sequence.num_prompt_tokens + len(sequence.tokens) - 1
        sequence.tokens += sequence.verify(base_len, sequence.tokens[-1:], [])
    for slab in (sequence.context, sequence.thread, sequence.selection, sequence.patches):
        pool.free(slab)
    return sequence.tokens
