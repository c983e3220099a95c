"""A chain of drafts: feed what is committed, choose a token, feed it, choose the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafter_svc.drafts import SequenceSpec
from engine.adjusting import Adjuster
from engine.attention import KvView
from engine.batch import Block
from engine.runner import TextRunner
from engine.sampling import Sampling
from engine.scheduler import Ask, Steps


@dataclass(frozen=True)
class Proposed:
    """A chain's tokens, and the time of the steps that they were made in."""

    token_ids: tuple[int, ...]
    steps_s: float


@dataclass(frozen=True)
class Chain:
    """What all rounds of a sequence share. RoPE position of the sequence's token i: i + `position_delta`."""

    runner: TextRunner
    position_delta: int
    sampling: Sampling
    adjuster: Adjuster | None = None

    def propose(
        self, kv: KvView, *, token_ids: Sequence[int], base_len: int, num_wanted: int, answer: Sequence[int] = ()
    ) -> Steps[Proposed]:
        """Returns `num_wanted` tokens to follow `token_ids`, which follow the first `base_len` of the sequence.

        Writes the rows of all of them but the last draft to `kv`, and advances it. `answer` is the answer so far,
        `token_ids` at its end; only an adjuster looks at it.
        """
        index, fed, drafts, steps_s = base_len, tuple(token_ids), list[int](), 0.0
        while len(drafts) < num_wanted:
            output = yield Ask(self.runner, Block(kv, fed, index + self.position_delta, num_chosen=1))
            kv.thread_len += len(fed)
            index += len(fed)
            adjusted = None if self.adjuster is None else self.adjuster.adjusted(output.logits, (*answer, *drafts))
            fed = tuple(output.choose(index, self.sampling, adjusted))
            drafts += fed
            steps_s += output.step_s
        return Proposed(tuple(drafts), steps_s)


def adjuster_of(spec: SequenceSpec, runner: TextRunner) -> Adjuster | None:
    """Returns what makes a chain's logits what the verifier makes of its own; None when nothing is asked for."""
    if spec.sampling.adjustments is None:
        return None
    return Adjuster(
        spec.sampling.adjustments,
        prompt_token_ids=spec.penalized_token_ids,
        eos_token_ids=runner.eos_token_ids,
    )
