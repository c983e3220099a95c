"""The values of a step: what each sequence puts into one forward, and what it gets back.

step      one forward over the rows of any number of sequences, without padding between them
block     the rows of one sequence: one for a plain token, a few for a verification, many of a prompt
output    a block's share of what came out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.attention import KvView, QueryTap
from engine.sampling import Sampling, choose


@dataclass(frozen=True)
class Block:
    """Rows that follow the first `kv.thread_len` of a thread; whoever made the block advances that afterwards.

    Rows are `token_ids`, or `embeds` [num_rows, hidden]. RoPE positions are consecutive from `position` on, or
    `positions` int64 [3, num_rows]. `added` [num_added, num_rows, hidden] goes to what the first layers give. Logits
    are wanted of the last `num_chosen` rows, the hidden states that enter layer `states_layer` of all rows; for the
    number of layers these are the ones after the final norm.
    """

    kv: KvView
    token_ids: Sequence[int] = ()
    position: int = 0
    num_chosen: int = 0
    states_layer: int | None = None
    embeds: Tensor | None = None
    positions: Tensor | None = None
    added: Tensor | None = None
    query_tap: QueryTap | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.token_ids) if self.embeds is None else self.embeds.shape[0]


@dataclass
class Output:
    """What a step computed of a block.

    `hidden` [num_rows, hidden] after the final norm, `logits` float32 [num_chosen, vocab], `likeliest` the token of
    each row of logits, the lowest id of equals; `states` [num_rows, hidden] when they were asked for. `step_s` is the
    time of the whole step.
    """

    hidden: Tensor
    logits: Tensor
    likeliest: list[int]
    states: Tensor | None
    step_s: float = 0.0

    def choose(self, first_index: int, sampling: Sampling, adjusted: Tensor | None = None) -> list[int]:
        """Returns the token chosen at each row of logits; the first row is for sequence index `first_index`.

        `adjusted` takes the place of the logits where the sampling has adjustments.
        """
        if adjusted is not None:
            return choose(adjusted, first_index, sampling)
        return self.likeliest if sampling.temperature == 0.0 else choose(self.logits, first_index, sampling)
