"""The model, the device thread and the open sequences: everything of the drafter that is not protobuf."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import torch

from drafter_svc.attachments import Attachments
from drafter_svc.config import DrafterConfig
from drafter_svc.drafts import Draft, DraftGuard, Round, SequenceSpec
from drafter_svc.sparse import SparseSequence
from engine.device_thread import DeviceThread
from engine.kv_share import KvNotShared, KvStale
from engine.loading import LoadedModel, load_model
from engine.runner import TextRunner
from foveate.rpc.errors import FailedPrecondition, invalid


@dataclass(frozen=True)
class Opened:
    """A gathered sparse view; time in microseconds."""

    num_sparse_tokens: int
    gather_us: int


class Drafter:
    """Drafts for any number of sequences on one device."""

    def __init__(self, config: DrafterConfig, loaded: LoadedModel, device: DeviceThread) -> None:
        self.config = config
        self.loaded = loaded
        self.num_sequences = 0
        self._device = device
        self._runner = TextRunner(loaded)
        self._attachments = Attachments(loaded.device)

    @classmethod
    async def load(cls, config: DrafterConfig, device: DeviceThread) -> Drafter:
        """Loads the model without its vision tower; raises ModelError."""

        def work() -> Drafter:
            torch.set_num_threads(config.num_threads)
            loaded = load_model(config.model_path, device=config.device, dtype=config.dtype, load_vision=False)
            return cls(config, loaded, device)

        return await device.run(work)

    @contextlib.asynccontextmanager
    async def sequence(self, spec: SequenceSpec) -> AsyncIterator[OpenSequence]:
        """Opens a sequence for the length of the block; its scratch is freed after the step that is running then.

        FAILED_PRECONDITION (MODEL_MISMATCH, KV_NOT_SHARED, KV_STALE) when it cannot be drafted for here.
        """
        self._check_model(spec)
        sequence = OpenSequence(self._device, self._guard(spec))
        self.num_sequences += 1
        try:
            await sequence.attach(self._runner, self._attachments, spec)
            yield sequence
        finally:
            self.num_sequences -= 1
            sequence.release()

    async def close(self) -> None:
        """Drops the mapped pools, after the work that is running."""
        await self._device.run(self._attachments.close)

    def _check_model(self, spec: SequenceSpec) -> None:
        theirs, ours = spec.handle, self.loaded
        if theirs.model_fingerprint != ours.fingerprint or theirs.layout != ours.layout:
            raise FailedPrecondition(
                "the verifier runs another model, or the same one in another dtype",
                reason="MODEL_MISMATCH",
                metadata={"verifier_fingerprint": theirs.model_fingerprint, "drafter_fingerprint": ours.fingerprint},
            )

    def _guard(self, spec: SequenceSpec) -> DraftGuard:
        vocab_size = self.loaded.tokenizer.get_vocab_size(with_added_tokens=True)
        return DraftGuard(spec, max_draft_tokens=self.config.max_draft_tokens, vocab_size=vocab_size)


class OpenSequence:
    """One answer's sequence, seen from the event loop; only the device thread touches what it holds there."""

    def __init__(self, device: DeviceThread, guard: DraftGuard) -> None:
        self._device, self._guard = device, guard
        self._cancelled = threading.Event()
        self._sparse: SparseSequence | None = None
        self.opened = Opened(0, 0)

    async def attach(self, runner: TextRunner, attachments: Attachments, spec: SequenceSpec) -> None:
        """Maps the pool if need be and gathers the sparse view."""

        def work() -> Opened:
            begin = time.perf_counter_ns()
            try:
                self._sparse = SparseSequence(runner, attachments.get(spec.handle), spec)
            except ValueError as error:  # a slab outside the pool
                raise invalid("open", str(error)) from error
            return Opened(self._sparse.num_sparse_tokens, (time.perf_counter_ns() - begin) // 1000)

        with _kv_errors():
            self.opened = await self._device.run(work)

    async def draft(self, asked: Round) -> Draft:
        """Drafts one round, or repeats its reply. FAILED_PRECONDITION (BASE_LEN_MISMATCH, KV_STALE)."""
        repeated = self._guard.admit(asked)
        if repeated is not None:
            return repeated
        with _kv_errors():
            draft = await self._device.run(self._draft, asked)
        self._guard.record(asked, draft)
        return draft

    def release(self) -> None:
        """Stops a running draft at its next token and frees the scratch after it. Never waits."""
        self._cancelled.set()
        self._device.submit(self._free)

    def _draft(self, asked: Round) -> Draft:
        assert self._sparse is not None
        return self._sparse.draft(asked, is_cancelled=self._cancelled.is_set)

    def _free(self) -> None:
        self._sparse = None


@contextlib.contextmanager
def _kv_errors() -> Iterator[None]:
    try:
        yield
    except KvStale as error:
        raise FailedPrecondition(str(error), reason="KV_STALE") from error
    except KvNotShared as error:
        raise FailedPrecondition(str(error), reason="KV_NOT_SHARED") from error
