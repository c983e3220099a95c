"""The verifiers of this gateway, as they are now, and which of them a question should go to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from foveate.context_source import ContextSource
from foveate.rpc.errors import FoveateError
from gateway.clients import Health, VerifierClient
from gateway.config import GatewayConfig
from gateway.failover import Route
from gateway.handshake import Refusals, check_one_model
from gateway.peers import Peers
from gateway.registry import Registry
from gateway.routing import Candidate, ranked, rendezvous_weight
from gateway.served import Served, TokenizerCache, look_at
from gateway.values import OpenedSequence, Question
from gateway.waiting import VerifierQueue, no_verifier

logger = logging.getLogger(__name__)

_FIRST_ANSWER_MS = 500.0  # until answers have been measured
_WEIGHT = 0.2  # of a new measurement
_COLD = (ContextSource.COLD_KV, ContextSource.COLD_EMBEDDINGS, ContextSource.COLD_KV_INT8)


class _Member:
    """A verifier that is ready."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.num_open_here = 0  # answers of this gateway
        self.num_open_elsewhere = 0  # those of others, when it was last looked at
        self.answer_ms = _FIRST_ANSWER_MS
        self.is_suspect = False

    @property
    def pool_id(self) -> str:
        return self.served.info.pool_id

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.pool_id, self.num_open_here + self.num_open_elsewhere, self.answer_ms)


class Verifiers:
    """Follows the health of every verifier; knows the ready ones, their load, and who holds what.

    It is the `Routes` of answers: it ranks verifiers for a question, and learns from how it went.
    """

    def __init__(self, config: GatewayConfig, peers: Peers[VerifierClient], registry: Registry) -> None:
        self.registry = registry
        self.queue = VerifierQueue(max_waiting=config.admission.max_waiting, limit_s=config.verifier_wait_s)
        self._config = config
        self._peers = peers
        self._tokenizers = TokenizerCache()
        self._members: dict[VerifierClient, _Member] = {}
        self._has_cold_tier = False
        self._num_lost = 0
        self._refusals = Refusals()

    @property
    def num_ready(self) -> int:
        """Number of verifiers that are ready."""
        return len(self._members)

    @property
    def pool_ids(self) -> frozenset[str]:
        """Pools of the verifiers that are ready."""
        return frozenset(member.pool_id for member in self._members.values())

    def served(self) -> Served:
        """Returns a verifier that is ready. Raises Unavailable while there is none."""
        for member in self._members.values():
            return member.served
        raise no_verifier()

    def all_served(self) -> list[Served]:
        """Returns every verifier that is ready. Raises Unavailable while there is none."""
        self.served()
        return [member.served for member in self._members.values()]

    def for_creation(self, key: str) -> Served:
        """Returns the verifier to make a context on: of the least busy ones, always the same for the same `key`."""
        members = list(self._members.values())
        least = min((member.candidate.num_open for member in members), default=0)
        idle = [member for member in members if member.candidate.num_open <= least + 1]
        if not idle:
            return self.served()
        return max(idle, key=lambda member: rendezvous_weight(key, member.pool_id)).served

    def for_request(self, key: str) -> Served:
        """Returns the verifier of a request: the same one whenever it is sent, as long as that one is ready."""
        self.served()
        return max(self._members.values(), key=lambda member: rendezvous_weight(key, member.pool_id)).served

    async def look(self) -> None:
        """Looks at every verifier once, all at the same time. One look at a time."""
        await self._peers.refresh()
        clients = self._peers.clients
        for gone in [client for client in self._members if client not in clients]:
            self._remove(gone, "has left")
        await asyncio.gather(*(self._look_at(client) for client in clients))

    async def refresh(self) -> None:
        """Asks every verifier that is ready how it is."""
        await asyncio.gather(*(self._refresh(client, member) for client, member in list(self._members.items())))

    # Routes of answers

    async def best_first(self, context: str) -> Sequence[Route]:
        """Returns every verifier that is ready, the best for a question on `context` first."""
        by_pool = {member.pool_id: member for member in self._members.values()}
        holders = await self.registry.holders(context) if len(by_pool) > 1 else frozenset()
        candidates = ranked(
            context,
            [member.candidate for member in by_pool.values()],
            holders=holders,
            fetch_ms=self.registry.fetch_ms(context),
        )
        routes = [Route(one.pool_id, by_pool[one.pool_id].served.verifier) for one in candidates]
        return sorted(routes, key=lambda route: by_pool[route.pool_id].is_suspect)

    def opened(self, route: Route, question: Question, opened: OpenedSequence) -> None:
        """An answer opened there: it holds the context, and said what getting it would cost another."""
        self.registry.note_holder(question.context, route.pool_id)
        cold_ms = [cost.estimated_ms for cost in opened.fetch.costs if cost.source in _COLD]
        self.registry.note_fetch_ms(question.context, min(cold_ms, default=None))
        if (member := self._by_pool(route.pool_id)) is not None:
            member.num_open_here += 1

    def closed(self, route: Route, took_s: float) -> None:
        """An answer there has ended."""
        if (member := self._by_pool(route.pool_id)) is not None:
            per_answer_ms = took_s * 1e3 / max(1, member.candidate.num_open)
            member.answer_ms += _WEIGHT * (per_answer_ms - member.answer_ms)
            member.num_open_here -= 1

    def not_held(self, route: Route, context: str) -> None:
        """The verifier does not have the context."""
        self.registry.drop_holder(context, route.pool_id)

    def lost(self, route: Route) -> None:
        """The verifier broke off an answer: others are tried before it until its health has been looked at again."""
        if (member := self._by_pool(route.pool_id)) is not None:
            member.is_suspect = True
        self._num_lost += 1

    @property
    def may_recover(self) -> bool:
        """Whether a lost answer can go on elsewhere, or on the same verifier once it is back."""
        return self._peers.may_grow or self._has_cold_tier

    def counters(self) -> Mapping[str, int]:
        """Returns the verifiers' counters of contexts, as they were last looked at, added up."""
        total = {"gateway_verifiers_lost": self._num_lost}
        for member in self._members.values():
            for name, count in member.served.info.context_counters.items():
                total[name] = total.get(name, 0) + count
        return total

    def _by_pool(self, pool_id: str) -> _Member | None:
        return next((member for member in self._members.values() if member.pool_id == pool_id), None)

    async def _look_at(self, client: VerifierClient) -> None:
        health = await client.health(self._config.health_timeout_s)
        member = self._members.get(client)
        if health is not Health.SERVING:
            if member is not None:
                self._remove(client, "does not answer" if health is Health.SILENT else "is lost")
            if health is Health.SILENT and self._members:
                # Others go on with its answers. Without others, an answer waits for it as long as its caller does.
                client.give_up_answers()
        elif member is None:
            await self._add(client)
        else:
            await self._refresh(client, member)
            member.is_suspect = False

    async def _add(self, client: VerifierClient) -> None:
        try:
            served = await look_at(client, self._tokenizers, self._config)
            for member in self._members.values():
                check_one_model(served.info, member.served.info)
        except FoveateError as error:
            self._refusals.say(client, f"verifier cannot be used yet: {error}")
            return
        self._refusals.forget(client)
        self._members[client] = _Member(served)
        self.queue.set_ready(True)
        self._has_cold_tier = self._has_cold_tier or served.info.has_cold_tier
        logger.info("verifier is ready: %s, pool %s", served.info.model, served.info.pool_id)

    async def _refresh(self, client: VerifierClient, member: _Member) -> None:
        try:
            info = await client.info(timeout_s=self._config.health_timeout_s)
        except FoveateError:
            return
        if self._members.get(client) is not member:
            return
        if info.pool_id != member.pool_id:  # it was restarted between two looks
            self._remove(client, "was restarted")
            await self._add(client)
            return
        member.num_open_elsewhere = max(0, info.num_sequences - member.num_open_here)
        member.served = replace(member.served, info=info)

    def _remove(self, client: VerifierClient, what: str) -> None:
        member = self._members.pop(client)
        self.queue.set_ready(bool(self._members))
        logger.warning("verifier with pool %s %s", member.pool_id, what)
