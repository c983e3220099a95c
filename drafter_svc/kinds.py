"""Which kinds of drafts a process offers, and how a sequence of each is opened."""

from __future__ import annotations

from dataclasses import dataclass

from drafter_svc.base import DraftSequence
from drafter_svc.config import DrafterConfig
from drafter_svc.drafts import DraftKind, SequenceSpec
from drafter_svc.layerskip import LayerskipSequence
from drafter_svc.small import SmallSequence
from drafter_svc.sparse import SparseSequence
from drafter_svc.streaming import StreamingSequence
from drafter_svc.video_features import VideoFeatures
from engine.early_exit import early_exit
from engine.kv_share import MappedPool
from engine.loading import LoadedModel, ModelError, load_model
from engine.preprocessing import patches_digest
from engine.runner import TextRunner
from foveate.rpc.errors import FailedPrecondition


@dataclass(frozen=True)
class SharedModel:
    """The verifier's own checkpoint, whole and cut short, for the kinds that read its KV."""

    loaded: LoadedModel
    runner: TextRunner
    short_runner: TextRunner

    @classmethod
    def load(cls, config: DrafterConfig) -> SharedModel | None:
        """Loads it without its vision tower; None when there is none. Raises ModelError."""
        if config.model_path is None:
            return None
        loaded = load_model(
            config.model_path,
            device=config.device,
            dtype=config.dtype,
            load_vision=False,
            device_map=config.device_map,
        )
        num_layers = config.layerskip_layers or max(1, loaded.layout.num_layers // 2)
        try:
            short = early_exit(loaded, num_layers)
        except ValueError as error:
            raise ModelError(f"--layerskip-layers: {error}") from error
        cache = config.kernel_cache
        return cls(loaded, TextRunner(loaded, kernel_cache=cache), TextRunner(short, kernel_cache=cache))

    def check(self, spec: SequenceSpec) -> None:
        """Raises FailedPrecondition (MODEL_MISMATCH) when the verifier's KV is another model's."""
        theirs, ours = spec.handle, self.loaded
        if theirs.model_fingerprint != ours.fingerprint or theirs.layout != ours.layout:
            raise FailedPrecondition(
                "the verifier runs another model, or the same one in another dtype",
                reason="MODEL_MISMATCH",
                metadata={"verifier_fingerprint": theirs.model_fingerprint, "drafter_fingerprint": ours.fingerprint},
            )

    def open(self, pool: MappedPool, spec: SequenceSpec) -> DraftSequence:
        """Opens a checked sequence. Raises KvStale and ValueError."""
        if spec.kind is DraftKind.LAYERSKIP:
            return LayerskipSequence(self.short_runner, pool, spec)
        kind = StreamingSequence if spec.kind is DraftKind.STREAMING else SparseSequence
        return kind(self.runner, pool, spec)


@dataclass(frozen=True)
class SmallModel:
    """A smaller checkpoint of the family, with its vision tower."""

    loaded: LoadedModel
    runner: TextRunner
    features: VideoFeatures
    patches_digest: str

    @classmethod
    def load(cls, config: DrafterConfig) -> SmallModel | None:
        """Loads it; None when there is none. Raises ModelError."""
        if config.small_model_path is None:
            return None
        loaded = load_model(config.small_model_path, device=config.device, dtype=config.dtype)
        runner = TextRunner(loaded, kernel_cache=config.kernel_cache)
        try:
            digest = patches_digest(loaded.family.frames(loaded.processor.video_processor))
        except ValueError as error:
            raise ModelError(f"--small-model: {error}") from error
        return cls(loaded, runner, VideoFeatures(loaded), digest)

    def check(self, spec: SequenceSpec) -> None:
        """Raises FailedPrecondition (MODEL_MISMATCH) when the verifier's patches are not this model's."""
        assert spec.video is not None, "a small model needs the video"
        if spec.video.patches_digest != self.patches_digest:
            raise FailedPrecondition(
                "the small model turns frames into other patches than the verifier", reason="MODEL_MISMATCH"
            )

    def open(self, pool: MappedPool, spec: SequenceSpec) -> DraftSequence:
        """Opens a checked sequence. Raises KvStale and ValueError."""
        return SmallSequence(self.runner, self.loaded, self.features, pool, spec)


class Kinds:
    """The kinds of one process."""

    def __init__(self, shared: SharedModel | None, small: SmallModel | None) -> None:
        assert shared is not None or small is not None, "a drafter has a model"
        self._shared, self._small = shared, small

    @classmethod
    def load(cls, config: DrafterConfig) -> Kinds:
        """Loads what the config names; raises ModelError."""
        return cls(SharedModel.load(config), SmallModel.load(config))

    @property
    def models(self) -> dict[DraftKind, LoadedModel]:
        """The model behind every kind that is offered, those that share the verifier's KV first."""
        offered: dict[DraftKind, LoadedModel] = {}
        if self._shared is not None:
            shared = (DraftKind.SPARSE, DraftKind.STREAMING, DraftKind.LAYERSKIP)
            offered |= dict.fromkeys(shared, self._shared.loaded)
        if self._small is not None:
            offered[DraftKind.SMALL] = self._small.loaded
        return offered

    def check(self, spec: SequenceSpec) -> None:
        """Raises FailedPrecondition (KIND_NOT_OFFERED, MODEL_MISMATCH) when no sequence like this can be opened."""
        self._model(spec).check(spec)

    def open(self, pool: MappedPool, spec: SequenceSpec) -> DraftSequence:
        """Opens a checked sequence of its kind. Raises KvStale and ValueError."""
        return self._model(spec).open(pool, spec)

    def _model(self, spec: SequenceSpec) -> SharedModel | SmallModel:
        model = self._small if spec.kind is DraftKind.SMALL else self._shared
        if model is None:
            raise FailedPrecondition(f"this drafter has no model for {spec.kind} drafts", reason="KIND_NOT_OFFERED")
        return model
