"""The models, the device thread and the open sequences: everything of the drafter that is not protobuf."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import torch

from drafter_svc.attachments import Attachments
from drafter_svc.base import DraftSequence
from drafter_svc.config import DrafterConfig
from drafter_svc.drafts import Draft, DraftGuard, DraftKind, Round, SequenceSpec
from drafter_svc.kinds import Kinds
from engine.device_thread import DeviceThread
from engine.kv_share import KvNotShared, KvStale
from engine.loading import LoadedModel
from engine.scheduler import Scheduler
from foveate.rpc.admission import refuse_beyond
from foveate.rpc.errors import FailedPrecondition, invalid
from foveate.telemetry import conventions as names
from foveate.telemetry.spans import UNTOLD, current_log, timed

# A dead verifier's memory is given back by then: the one that follows it may not fit into /dev/shm before.
_SWEEP_S = 1.0


@dataclass(frozen=True)
class Opened:
    """The drafter's view of a sequence; time in microseconds."""

    num_sparse_tokens: int
    gather_us: int


class Drafter:
    """Drafts for any number of sequences on one device."""

    def __init__(self, config: DrafterConfig, kinds: Kinds, device: DeviceThread) -> None:
        self.config = config
        self.models_by_kind: dict[DraftKind, LoadedModel] = kinds.models
        self.main = next(iter(self.models_by_kind.values()))
        self.num_sequences = 0
        self._kinds = kinds
        self._device = device
        self._scheduler = Scheduler(device, max_rows=config.max_step_rows)
        self._attachments = Attachments(self.main.device)
        self._sweeping: asyncio.Task[None] | None = None

    @classmethod
    async def load(cls, config: DrafterConfig, device: DeviceThread) -> Drafter:
        """Loads the models on the device thread; raises ModelError."""

        def work() -> Drafter:
            torch.set_num_threads(config.num_threads)
            return cls(config, Kinds.load(config), device)

        drafter = await device.run(work)
        drafter._sweeping = asyncio.create_task(drafter._sweep())
        return drafter

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        size: int = self.main.tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def num_waiting(self) -> int:
        """Number of steps that wait for the device or run."""
        return self._device.num_waiting + self._scheduler.num_live

    @property
    def num_steps(self) -> int:
        """Number of steps that have run."""
        return self._scheduler.num_steps

    @property
    def num_blocks(self) -> int:
        """Number of sequences' parts in those steps; by the steps, the batch size."""
        return self._scheduler.num_blocks

    @property
    def num_pools(self) -> int:
        """Number of pools that are mapped."""
        return len(self._attachments)

    @contextlib.asynccontextmanager
    async def sequence(self, spec: SequenceSpec) -> AsyncIterator[OpenSequence]:
        """Opens a sequence for the length of the block; its scratch is freed after the step that is running then.

        RESOURCE_EXHAUSTED when too many are open; FAILED_PRECONDITION (KIND_NOT_OFFERED, MODEL_MISMATCH, KV_NOT_SHARED,
        KV_STALE) when it cannot be drafted for here.
        """
        self._kinds.check(spec)
        refuse_beyond(self.config.max_sequences, self.num_sequences)
        sequence = OpenSequence(self._scheduler, self._guard(spec))
        self.num_sequences += 1
        try:
            await sequence.attach(self._kinds, self._attachments, spec)
            yield sequence
        finally:
            self.num_sequences -= 1
            sequence.release()

    async def close(self) -> None:
        """Drops the mapped pools, after the work that is running."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self._device.run(self._attachments.close)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            if len(self._attachments):
                await self._device.run(self._attachments.drop_stale)

    def _guard(self, spec: SequenceSpec) -> DraftGuard:
        return DraftGuard(spec, max_draft_tokens=self.config.max_draft_tokens, vocab_size=self.vocab_size)


class OpenSequence:
    """One answer's sequence, seen from the event loop; only the device thread touches what it holds there."""

    def __init__(self, scheduler: Scheduler, guard: DraftGuard) -> None:
        self._scheduler, self._guard = scheduler, guard
        self._sequence: DraftSequence | None = None
        self.opened = Opened(0, 0)

    async def attach(self, kinds: Kinds, attachments: Attachments, spec: SequenceSpec) -> None:
        """Maps the pool if need be and makes the view of the sequence."""

        def work() -> Opened:
            begin = time.perf_counter_ns()
            try:
                self._sequence = kinds.open(attachments.get(spec.handle), spec)
            except ValueError as error:  # a slab outside the pool, or a grid that does not fit its patches
                raise invalid("open", str(error)) from error
            return Opened(self._sequence.num_context_rows, (time.perf_counter_ns() - begin) // 1000)

        with _kv_errors():
            self.opened = await self._scheduler.device.run(timed(names.SPAN_ATTACH, work))

    async def draft(self, asked: Round) -> Draft:
        """Drafts one round, or repeats its reply. FAILED_PRECONDITION (BASE_LEN_MISMATCH, KV_STALE)."""
        repeated = self._guard.admit(asked)
        if repeated is not None:
            return repeated
        assert self._sequence is not None, "attach comes first"
        with _kv_errors():
            told = UNTOLD if current_log() is None else {names.ROUND: asked.round}
            draft = await self._scheduler.steps(self._sequence.draft(asked), names.SPAN_DRAFT, told)
        self._guard.record(asked, draft)
        return draft

    def release(self) -> None:
        """Frees the scratch after the step that is running; a draft that was cancelled takes no part in later ones."""
        self._scheduler.device.submit(self._free)

    def _free(self) -> None:
        self._sequence = None


@contextlib.contextmanager
def _kv_errors() -> Iterator[None]:
    try:
        yield
    except KvStale as error:
        raise FailedPrecondition(str(error), reason="KV_STALE") from error
    except KvNotShared as error:
        raise FailedPrecondition(str(error), reason="KV_NOT_SHARED") from error
