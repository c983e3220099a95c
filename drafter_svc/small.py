"""Drafting with a smaller model of the family that reads a pruned video (SpecVLM, arXiv 2508.16201).

    verifier's pool, read-only    selection: which visual tokens stay, the same for all layers and heads
    owned here                    the small model's KV: text and surviving visual tokens | prompt | answer and drafts

The survivors keep the 3-D positions they have in the whole video. A token's row in this KV is its place among what is
kept; its RoPE position is that of the whole sequence. The KV is the small model's own, so it is exact for committed
tokens too: only what was drafted and rejected is overwritten.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_svc.chain import Chain, adjuster_of
from drafter_svc.drafts import Draft, Round, SequenceSpec
from drafter_svc.shared_kv import checked_selection, text_rows
from drafter_svc.video_features import VideoFeatures
from engine.attention import KvView
from engine.batch import Block
from engine.kv_share import KvStale, MappedPool
from engine.loading import LoadedModel
from engine.positions import text_positions
from engine.runner import TextRunner
from engine.scheduler import Steps
from engine.visual_rows import place_features

_PREFILL_CHUNK = 512


class SmallSequence:
    """One sequence of the small model."""

    def __init__(
        self, runner: TextRunner, loaded: LoadedModel, features: VideoFeatures, pool: MappedPool, spec: SequenceSpec
    ) -> None:
        """Prefills the pruned context and the prompt.

        Raises KvStale when the pool does not hold what `spec` says, ValueError when something does not lie in it.
        """
        assert spec.video is not None, "a small model needs the video"
        self._spec, self._pool = spec, pool
        kept = _kept_rows(spec, pool)
        self.num_context_rows = len(kept)
        layout, capacity = loaded.layout, len(kept) + spec.thread.capacity
        shape = (layout.num_layers, layout.num_kv_heads, capacity, layout.head_dim)
        empty = torch.zeros(shape, dtype=loaded.dtype, device=loaded.device)
        self._kv = empty, torch.zeros_like(empty)
        # Sequence index of a thread token + shift = its row here.
        self._shift = len(kept) - spec.num_context_tokens
        token_ids = _context_token_ids(spec, loaded.family.video_token_id)
        positions = loaded.family.positions(token_ids, [spec.video.grid], [spec.video.second_per_grid])
        delta = positions.next_position - spec.num_context_tokens
        self._chain = Chain(runner, delta, spec.sampling, adjuster_of(spec, runner))
        embeds = runner.embed([token_ids[row] for row in kept]).clone()
        added = _place_features(embeds, kept, features.get(pool, spec.video), spec)
        prompt = spec.video.prompt_token_ids
        asked = text_positions(spec.num_context_tokens + delta, len(prompt))
        self._prefill(
            runner,
            torch.cat([embeds, runner.embed(prompt)]),
            torch.cat([positions.ids[:, torch.tensor(kept)], asked], dim=1),
            None if added is None else F.pad(added, (0, 0, 0, len(prompt))),
        )
        # Tokens of the answer, by sequence index from num_prompt_tokens on, of which `_num_fed` have rows.
        self._answer: list[int] = []
        self._num_fed = 0

    def draft(self, asked: Round) -> Steps[Draft]:
        """Proposes tokens after a round's; fewer when the sequence ends. Raises KvStale."""
        self._pool.check()
        start = self._spec.num_prompt_tokens
        committed = [*self._answer[: asked.base_len - start], *asked.token_ids]
        # The last draft of a round is not fed, so a draft kept whole leaves one token without a row.
        num_fed = min(self._num_fed, asked.base_len - start)
        proposed = yield from self._chain.propose(
            KvView(None, self._kv, start + num_fed + self._shift),
            token_ids=committed[num_fed:],
            base_len=start + num_fed,
            num_wanted=self._spec.num_wanted(asked),
            answer=committed,
        )
        drafts = proposed.token_ids
        self._answer = [*committed, *drafts]
        self._num_fed = len(committed) + len(drafts) - 1 if drafts else num_fed
        return Draft(asked.round, asked.base_len, drafts, int(proposed.steps_s * 1e6))

    def _prefill(self, runner: TextRunner, embeds: Tensor, positions: Tensor, added: Tensor | None) -> None:
        for start in range(0, embeds.shape[0], _PREFILL_CHUNK):
            rows = slice(start, start + _PREFILL_CHUNK)
            more = None if added is None else added[:, rows]
            kv = KvView(None, self._kv, start)
            runner.run([Block(kv, embeds=embeds[rows], positions=positions[:, rows], added=more)])


def _kept_rows(spec: SequenceSpec, pool: MappedPool) -> list[int]:
    """Returns the context's rows that stay, ascending: all text, and the selected visual tokens."""
    selection = checked_selection(spec, pool)
    chosen = selection[0, 0].tolist()
    text = text_rows(spec)
    if bool((selection != selection[:1, :1]).any()) or not set(chosen).isdisjoint(text):
        raise KvStale("the selection is not one of visual tokens for all layers and heads")
    return sorted([*text, *chosen])


def _context_token_ids(spec: SequenceSpec, video_token_id: int) -> list[int]:
    """Returns the context's token ids: its text, with placeholders where the video is."""
    assert spec.video is not None
    text = iter(spec.video.text_token_ids)
    is_text = set(text_rows(spec))
    return [next(text) if row in is_text else video_token_id for row in range(spec.num_context_tokens)]


def _place_features(embeds: Tensor, kept: list[int], features: Tensor, spec: SequenceSpec) -> Tensor | None:
    """Puts the survivors' features where their placeholders are; returns what is beyond the embeddings.

    Raises ValueError when there are too few.
    """
    visual = [row for start, num_tokens in spec.visual_spans for row in range(start, start + num_tokens)]
    if features.shape[0] != len(visual):
        raise ValueError(
            f"the video has {len(visual)} visual tokens, the small model's tower gives {features.shape[0]}"
        )
    feature_of = {row: index for index, row in enumerate(visual)}
    places = [(place, feature_of[row]) for place, row in enumerate(kept) if row in feature_of]
    if not places:
        return None
    here, there = (torch.tensor(part, device=embeds.device) for part in zip(*places, strict=True))
    return place_features(embeds, here, features[there])
