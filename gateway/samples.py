"""Several answers to one question at once: to the rest of the gateway each is a question of its own, with its own seed.

The first opens its sequence, and the verifier prefills the question. The others wait for that and open forks of it:
the prompt's rows and the selection are copied, and one token is computed. The context is shared anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import replace

from gateway.exchange import Deadline
from gateway.sequences import OpenSequence, SequenceOpener
from gateway.values import Question

_SEEDS = 1 << 64


def each_of(question: Question) -> tuple[Question, ...]:
    """Returns the questions of the answers that are asked for; answer i has the seed plus i."""
    sampling, seed = question.sampling, question.sampling.seed or 0
    seeds = [(seed + index) % _SEEDS for index in range(question.num_answers)]
    return tuple(replace(question, num_answers=1, sampling=replace(sampling, seed=one)) for one in seeds)


class Forks:
    """Opens the sequences of one call: the first as it is, the others as forks of it once it is open."""

    def __init__(self, opener: SequenceOpener) -> None:
        self._opener = opener
        self._origin: asyncio.Future[str] | None = None

    @contextlib.asynccontextmanager
    async def open_sequence(self, question: Question, deadline: Deadline) -> AsyncIterator[OpenSequence]:
        """Opens a sequence; raises what opening raises. When the first cannot open, the others wait for ever."""
        if self._origin is not None:
            forked = replace(question, fork_of=await self._origin)
            async with self._opener.open_sequence(forked, deadline) as sequence:
                yield sequence
            return
        self._origin = asyncio.get_running_loop().create_future()
        async with self._opener.open_sequence(question, deadline) as sequence:
            self._origin.set_result(sequence.opened.sequence_id)
            yield sequence


async def all_of(answers: Iterable[Coroutine[None, None, None]]) -> None:
    """Runs answers side by side until all have ended. The first that fails cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in answers:
                group.create_task(one)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
