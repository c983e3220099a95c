"""Writing contexts to the cold tier, behind the answers' backs: one at a time, with the slab held meanwhile.

The smallest forms go first: a verifier that dies early has left what another one can go on from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from torch import Tensor

from engine.device_thread import DeviceThread
from engine.kv_pool import KvPool
from foveate.context_source import ContextSource
from foveate.store.errors import StoreError
from foveate.v1 import contexts_pb2
from verifier_svc.cold.forms import Array, facts_to_proto
from verifier_svc.cold.int8 import to_int8
from verifier_svc.cold.tier import ColdTier
from verifier_svc.contexts import ContextStore, HeldContext
from verifier_svc.directory import Directory
from verifier_svc.media import Media
from verifier_svc.prefill import EncodedVideo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Publishing:
    """What the maker of a context still has at hand: what it prefilled, and the video file when it is small enough."""

    encoded: EncodedVideo | None
    media: bytes | None


class Publisher:
    """Announces contexts at once and writes their cold copies in the background."""

    def __init__(
        self,
        pool: KvPool,
        *,
        device: DeviceThread,
        contexts: ContextStore,
        cold: ColdTier,
        directory: Directory,
        max_media_bytes: int,
        int8: bool,
    ) -> None:
        self._pool = pool
        self._device = device
        self._contexts = contexts
        self._cold = cold
        self._directory = directory
        self._max_media_bytes = max_media_bytes
        self._int8 = int8
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Number of contexts that are being written or wait for it."""
        return len(self._tasks)

    async def close(self, hand_over_s: float) -> None:
        """Writes what is not written yet, so that others can go on with it; gives up what takes longer than that."""
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=hand_over_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def media_at_hand(self, media: Media | None) -> bytes | None:
        """Returns a video file's bytes, unless it is too large to be kept."""
        if media is None or media.num_bytes > self._max_media_bytes:
            return None
        return await asyncio.to_thread(media.read_all)

    async def announce(self, held: HeldContext, token: int, publishing: Publishing) -> None:
        """Tells everybody where a context is, then writes its copies in the background. Token 0: there is no Redis.

        A lossy context stays this verifier's own.
        """
        if token == 0 or held.is_lossy:  # what is not exact is nobody else's, and no source of copies
            return
        held.fencing_token = token
        with contextlib.suppress(StoreError):
            await self._directory.announce(context_of(held), held.facts.tenant, token, is_pinned=held.is_pinned)
        task = asyncio.create_task(self._publish(held.facts.context_id, token, publishing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _publish(self, context_id: str, token: int, publishing: Publishing) -> None:
        async with self._one_at_a_time:
            held = self._contexts.get(context_id)
            if held is None:  # it was released before its turn came
                return
            held = self._contexts.acquire(context_id)
            try:
                await self._write_forms(held, token, publishing)
            except Exception:
                logger.exception("the cold copies of %s were not written", context_id)
            finally:
                self._contexts.give_back(held)

    async def _write_forms(self, held: HeldContext, token: int, publishing: Publishing) -> None:
        forms: list[tuple[ContextSource, Callable[[], Awaitable[list[Array]]]]] = []
        encoded, media = publishing.encoded, publishing.media
        if media is not None:
            forms.append((ContextSource.MEDIA, lambda: _ready([Array.of_bytes("media", media)])))
        if encoded is not None:
            forms.append((ContextSource.COLD_EMBEDDINGS, lambda: self._arrays({"visual_features": encoded.features})))
        if self._int8:
            forms.append((ContextSource.COLD_KV_INT8, lambda: self._in_eight_bits(held)))
        else:
            forms.append((ContextSource.COLD_KV, lambda: self._arrays(self._of_pool(held))))
        for form, arrays_of in forms:
            if form in held.cold_bytes:
                continue
            arrays = await arrays_of()
            if await self._cold.publish(held.facts, form, arrays, token):
                held.cold_bytes[form] = sum(len(array.data) for array in arrays)

    async def _in_eight_bits(self, held: HeldContext) -> list[Array]:
        tensors = self._of_pool(held)
        integers, scales = await self._device.run(to_int8, tensors.pop("kv"))
        return await self._arrays({"kv_int8": integers, "kv_scales": scales, **tensors})

    def _of_pool(self, held: HeldContext) -> dict[str, Tensor]:
        layout = self._pool.layout
        shape = (2, layout.num_layers, layout.num_kv_heads, held.slab.capacity, layout.head_dim)
        kv = self._pool.region(held.slab).view(layout.dtype).view(shape)
        return {"kv": kv, **{name: self._pool.tensor_view(one) for name, one in held.tensors.items()}}

    async def _arrays(self, tensors: dict[str, Tensor]) -> list[Array]:
        on_host = {name: await self._device.run(_to_host, tensor) for name, tensor in tensors.items()}
        return [Array.of(name, tensor) for name, tensor in on_host.items()]


def context_of(held: HeldContext) -> contexts_pb2.Context:
    """Returns what everybody may know of a context, without what depends on the moment."""
    return facts_to_proto(held.facts).context


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().cpu()  # no copy when it is there already


async def _ready(arrays: list[Array]) -> list[Array]:
    return arrays
