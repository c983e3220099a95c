"""The cold tier: publish, find, restore, delete, touch. Chunks are written first and the manifest last.

    a copy   is written by                  is read by                        goes
    chunks   one flight, its generation     whoever has the manifest          with their TTL, or with the copy
    manifest the same, if not overtaken     every verifier of this identity   first, so that no copy is half there

Nothing here can make an answer wrong: what a manifest promises is compared with what is read, byte for byte, and a copy
that does not hold is removed and counted. Nothing here is needed for an answer either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foveate.context_source import ContextSource
from foveate.store import keys, scripts
from foveate.store.client import Store
from foveate.store.errors import Corrupt, Full, Missing, StoreError, Unreachable
from foveate.store.frame import Kind, pack, unpack
from foveate.v1 import records_pb2
from verifier_svc.cold.bulk import Value
from verifier_svc.cold.chunks import HEADER_BYTES, CopyName, checksum, form_name, form_of
from verifier_svc.cold.costs import CostModel
from verifier_svc.cold.forms import Array, Copy, copy_of, manifest_of, split_all
from verifier_svc.cold.transfer import Transfer
from verifier_svc.config import ColdConfig
from verifier_svc.contexts import ContextFacts

logger = logging.getLogger(__name__)

FORMS = (ContextSource.COLD_KV, ContextSource.COLD_EMBEDDINGS, ContextSource.MEDIA, ContextSource.COLD_KV_INT8)
_FULL_PAUSE_S = 30.0  # after Redis said that it has no room
_SLOWEST_BANDWIDTH = 20e6  # bytes/s; a transfer that is slower is given up
_KEYS_PER_COMMAND = 128
_TRANSFER_FLOOR_S = 2.0
_MAX_CHUNKS = 1_000_000


@dataclass(frozen=True)
class Stored:
    """Bytes of each form of a context, and when it was last used on the server's clock; infinite when pinned."""

    num_bytes: Mapping[ContextSource, int]
    used_s: float


class ColdTier:
    """Copies of contexts in Redis. Every failure to read is a StoreError; a failure to write is only counted."""

    def __init__(self, store: Store, config: ColdConfig) -> None:
        self.counters: Counter[str] = Counter()
        self.costs = CostModel()
        self._store = store
        self._config = config
        self._transfer = Transfer(store.settings.address, num_connections=config.num_connections, connect_timeout_s=1.0)
        self._room = asyncio.Lock()
        self._paused_until_s = 0.0
        self.num_bytes_kept = 0  # of all copies together, everybody's, as it was at the last write

    @property
    def ttl_s(self) -> float:
        """How long a copy is kept that nobody uses."""
        return self._config.ttl_s

    async def close(self) -> None:
        """Waits for running transfers and closes the connections."""
        await asyncio.to_thread(self._transfer.close)

    async def find(self, context_id: str, tenant: str) -> dict[ContextSource, Copy]:
        """Returns the copies of a context by form; empty when there are none. Raises Unreachable.

        Copies in eight bits are found only where the settings allow them. A manifest that is damaged, or another
        context's, is removed and counted.
        """
        forms = [form for form in FORMS if self._config.int8 or form is not ContextSource.COLD_KV_INT8]
        names = [keys.manifest(context_id, form_name(form)) for form in forms]
        found: list[bytes | None] = await self._store.run(lambda client: client.mget(names))
        copies = {}
        for form, data in zip(forms, found, strict=True):
            if data is None:
                continue
            try:
                manifest = unpack(Kind.MANIFEST, data, records_pb2.ColdManifest)
                copy = copy_of(manifest, context_id=context_id, form=form)
                if copy.facts.tenant == tenant:  # another tenant's is none of the caller's business
                    copies[form] = copy
            except Corrupt as error:
                self.counters["cold_corrupt"] += 1
                logger.error("a cold %s copy of %s is refused: %s", form_name(form), context_id, error)
                await self._forget(keys.manifest(context_id, form_name(form)))
        return copies

    async def restore(self, copy: Copy, into: Mapping[str, memoryview]) -> None:
        """Fills the arrays of a copy; every byte is checked. Raises StoreError after the copy was given up.

        The memory in `into` is no longer written to when this returns or raises, also when it is cancelled.
        """
        arrays = [into[tensor.name] for tensor in copy.manifest.tensors]
        chunks = split_all([len(array) for array in arrays])
        values, checksums = [], {}
        for index, ((place, start, length), chunk) in enumerate(zip(chunks, copy.manifest.chunks, strict=True)):
            header = copy.name.header(index, length, chunk.xxh3_128)
            key = copy.name.chunk_key(index)
            values.append(Value(key, header, arrays[place][start : start + length]))
            checksums[key] = chunk.xxh3_128

        def check(value: Value) -> None:
            if checksum(value.payload) != checksums[value.key]:
                raise Corrupt(f"{value.key} is damaged")

        before = time.perf_counter()
        try:
            await self._transfer.read(values, deadline_s=_deadline_s(copy.num_bytes), check=check)
        except StoreError as error:
            await self._give_up(copy, error)
            raise
        self.costs.saw_read(copy.num_bytes, time.perf_counter() - before)
        self.counters["cold_bytes_read"] += copy.num_bytes

    async def publish(self, facts: ContextFacts, form: ContextSource, arrays: Sequence[Array], generation: int) -> bool:
        """Writes a copy and tells whether it is there now; the arrays must not change meanwhile. Raises nothing."""
        name = CopyName(facts.context_id, form, generation)
        num_bytes = sum(len(array.data) for array in arrays)
        try:
            return await self._publish(facts, name, arrays, num_bytes)
        except Full:
            self.counters["cold_full"] += 1
            self._paused_until_s = time.monotonic() + _FULL_PAUSE_S
            logger.warning("Redis has no room for a cold copy; none is written for %.0f s", _FULL_PAUSE_S)
        except StoreError as error:
            self.counters["cold_unwritten"] += 1
            logger.warning("a cold %s copy of %s was not written: %s", form_name(form), facts.context_id, error)
        with contextlib.suppress(StoreError):
            await self._remove_chunks(name, len(split_all([len(array.data) for array in arrays])))
        return False

    async def delete(self, context_id: str) -> bool:
        """Removes every copy of a context and tells whether there was one. Raises Unreachable."""
        members = [member for member, _ in await self._members() if member.startswith(f"{context_id}/")]
        names = [keys.manifest(context_id, form_name(form)) for form in FORMS]
        num_deleted: int = await self._store.run(lambda client: client.delete(*names))
        for member in members:
            await self._remove_member(member)
        return num_deleted > 0

    async def inventory(self) -> dict[str, Stored]:
        """Returns what the index says there is, by context id. Raises Unreachable."""
        found: dict[str, Stored] = {}
        for member, used_s in await self._members():
            name, num_bytes, _ = _parse_member(member)
            before = found.get(name.context_id, Stored({}, used_s))
            found[name.context_id] = Stored({**before.num_bytes, name.form: num_bytes}, max(before.used_s, used_s))
        return found

    async def touch(self, context_id: str, *, is_pinned: bool) -> None:
        """Puts the expiry of every copy off, or takes it away. Raises Unreachable."""
        now_s = float("inf") if is_pinned else await self._now_s()
        for member, _ in await self._members():
            if not member.startswith(f"{context_id}/"):
                continue
            name, _, num_chunks = _parse_member(member)
            of_copy = [name.manifest_key, *(name.chunk_key(index) for index in range(num_chunks))]
            await self._store.run(lambda client, of_copy=of_copy: self._expire(client, of_copy, is_pinned))  # type: ignore[misc]
            await self._store.run(lambda client, member=member: client.zadd(keys.COLD_INDEX, {member: now_s}, xx=True))  # type: ignore[misc]

    async def _expire(self, client: Any, names: Sequence[str], is_pinned: bool) -> None:
        pipeline = client.pipeline(transaction=False)
        for one in names:
            if is_pinned:
                pipeline.persist(one)
            else:
                pipeline.pexpire(one, self._ttl_ms)
        await pipeline.execute()

    async def _publish(self, facts: ContextFacts, name: CopyName, arrays: Sequence[Array], num_bytes: int) -> bool:
        if time.monotonic() < self._paused_until_s or not await self._make_room(num_bytes):
            self.counters["cold_not_admitted"] += 1
            return False
        chunks = split_all([len(array.data) for array in arrays])
        before = time.perf_counter()
        payloads = [arrays[place].data[start : start + length] for place, start, length in chunks]
        sums = await asyncio.to_thread(lambda: [checksum(payload) for payload in payloads])
        values = [
            Value(name.chunk_key(index), name.header(index, len(payload), sums[index]), payload)
            for index, payload in enumerate(payloads)
        ]
        await self._transfer.write(values, ttl_ms=self._ttl_ms, deadline_s=_deadline_s(num_bytes))
        took_s = time.perf_counter() - before
        described = [(len(payload), total) for payload, total in zip(payloads, sums, strict=True)]
        manifest = pack(Kind.MANIFEST, manifest_of(facts, name, arrays, described, took_s * 1e3))
        place = [keys.token(facts.context_id), name.manifest_key]
        if not await self._store.script(scripts.COMMIT_MANIFEST, place, [name.generation, manifest, self._ttl_ms]):
            self.counters["cold_fenced"] += 1
            raise Unreachable("another verifier took this context over meanwhile")
        now_s = await self._now_s()
        member = f"{name.context_id}/{form_name(name.form)}/{name.generation}/{num_bytes}/{len(chunks)}"
        await self._store.run(lambda client: client.zadd(keys.COLD_INDEX, {member: now_s}))
        await self._remove_older(name, member)
        self.costs.saw_write(num_bytes, took_s)
        self.counters[f"cold_published_{form_name(name.form)}"] += 1
        self.counters["cold_bytes_written"] += num_bytes
        return True

    async def _remove_older(self, name: CopyName, newest: str) -> None:
        of_form = f"{name.context_id}/{form_name(name.form)}/"
        for member, _ in await self._members():
            if member.startswith(of_form) and member != newest:
                await self._remove_member(member)

    async def _make_room(self, num_bytes: int) -> bool:
        """Removes the copies used longest ago until `num_bytes` more are within the cap; False when they never are."""
        if num_bytes > self._config.max_bytes:
            return False
        async with self._room:
            oldest_s = await self._now_s() - self._config.ttl_s
            held = []
            for member, used_s in await self._members():
                if used_s < oldest_s:
                    await self._remove_member(member)
                else:
                    held.append((member, used_s))
            total = sum(_parse_member(member)[1] for member, _ in held)
            for member, used_s in held:
                if total + num_bytes <= self._config.max_bytes:
                    break
                if used_s == float("inf"):
                    return False
                await self._remove_member(member)
                self.counters["cold_evicted"] += 1
                total -= _parse_member(member)[1]
            fits = total + num_bytes <= self._config.max_bytes
            self.num_bytes_kept = total + num_bytes if fits else total
            return fits

    async def _members(self) -> list[tuple[str, float]]:
        """Returns the copies that the index names, the one used longest ago first; other members are removed."""
        found = await self._store.run(lambda client: client.zrange(keys.COLD_INDEX, 0, -1, withscores=True))
        members = []
        for raw, score in found:
            member = raw.decode(errors="replace")
            try:
                _parse_member(member)
            except (ValueError, KeyError):
                await self._store.run(lambda client, raw=raw: client.zrem(keys.COLD_INDEX, raw))  # type: ignore[misc]
                continue
            members.append((member, float(score)))
        return members

    async def _remove_member(self, member: str) -> None:
        name, _, num_chunks = _parse_member(member)
        data = await self._store.run(lambda client: client.get(name.manifest_key))
        if data is not None and _generation(data) in (name.generation, None):
            await self._forget(name.manifest_key)
        await self._remove_chunks(name, num_chunks)
        await self._store.run(lambda client: client.zrem(keys.COLD_INDEX, member))

    async def _remove_chunks(self, name: CopyName, num_chunks: int) -> None:
        for some in _in_groups([name.chunk_key(index) for index in range(num_chunks)]):
            await self._store.run(lambda client, some=some: client.unlink(*some))  # type: ignore[misc]

    async def _give_up(self, copy: Copy, error: StoreError) -> None:
        """Counts why a copy could not be read and removes one that never can be."""
        if isinstance(error, Unreachable):
            self.counters["cold_unreachable"] += 1
            return
        self.counters["cold_missing" if isinstance(error, Missing) else "cold_corrupt"] += 1
        logger.error("a cold %s copy of %s is given up: %s", form_name(copy.name.form), copy.name.context_id, error)
        with contextlib.suppress(StoreError):
            await self._forget(copy.name.manifest_key)
            await self._remove_chunks(copy.name, len(copy.manifest.chunks))

    async def _forget(self, manifest_key: str) -> None:
        await self._store.run(lambda client: client.delete(manifest_key))

    async def _now_s(self) -> float:
        seconds, micros = await self._store.script(scripts.SERVER_TIME, [keys.COLD_INDEX], [])
        return float(seconds) + float(micros) / 1e6

    @property
    def _ttl_ms(self) -> int:
        return int(self._config.ttl_s * 1e3)


def _deadline_s(num_bytes: int) -> float:
    return time.monotonic() + _TRANSFER_FLOOR_S + (num_bytes + HEADER_BYTES) / _SLOWEST_BANDWIDTH


def _parse_member(member: str) -> tuple[CopyName, int, int]:
    """Returns name, bytes and number of chunks; ValueError or KeyError when it is no member of the index."""
    context_id, form, generation, num_bytes, num_chunks = member.split("/")
    if len(bytes.fromhex(context_id)) != 32 or not 0 <= int(num_chunks) <= _MAX_CHUNKS:
        raise ValueError(member)
    return CopyName(context_id, form_of(form), int(generation)), int(num_bytes), int(num_chunks)


def _generation(data: bytes) -> int | None:
    try:
        return int(unpack(Kind.MANIFEST, data, records_pb2.ColdManifest).generation)
    except Corrupt:
        return None


def _in_groups(names: list[str]) -> Iterable[list[str]]:
    return (names[start : start + _KEYS_PER_COMMAND] for start in range(0, len(names), _KEYS_PER_COMMAND))
