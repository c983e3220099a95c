"""Peers behind a name come and go without a failed answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from foveate.rpc.channel import open_channel
from foveate.rpc.errors import Unavailable
from foveate.rpc.security import ClientTls
from foveate.rpc.server import running
from foveate.v1 import answers_pb2, answers_pb2_grpc
from gateway.backends import Backends, connected
from gateway.clients import Health, VerifierClient
from gateway.config import GatewayConfig
from gateway.exchange import Deadline
from gateway.facts import ContextSpec, MediaChunk
from gateway.main import make_server
from gateway.peers import Peers
from tests.fakes import CONTEXT, FakeDrafter, FakeVerifier, ToyModel, serving_drafter, serving_verifier, until

TEXT = "The red square moves left and then the blue circle moves right. " * 3
MODEL = ToyModel.of(TEXT)


class Names:
    """A DNS server that is told what to say."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.fails = False

    async def __call__(self, host: str, port: int) -> list[str]:
        if self.fails:
            raise OSError("no such name")
        return self.addresses[host]


@contextlib.asynccontextmanager
async def gateway(names: Names) -> AsyncIterator[tuple[Backends, answers_pb2_grpc.AnswerServiceAsyncStub]]:
    config = GatewayConfig("dns:verifier:1", "dns:drafter:1", health_interval_s=0.02)
    async with connected(config, names) as backends, running(make_server(config, backends), grace_s=0) as server:
        following = asyncio.create_task(backends.follow(server.set_serving))
        try:
            async with open_channel(f"127.0.0.1:{server.port}") as channel:
                yield backends, answers_pb2_grpc.AnswerServiceStub(channel)  # type: ignore[misc]
        finally:
            following.cancel()


async def ask(stub: answers_pb2_grpc.AnswerServiceAsyncStub) -> str:
    request = answers_pb2.AskRequest(context=CONTEXT, question="What?")
    return "".join([response.delta.text async for response in stub.Ask(request)])


async def test_peers_join_and_leave_under_load() -> None:
    names = Names()
    verifiers, drafters = [FakeVerifier(MODEL) for _ in range(2)], [FakeDrafter(MODEL) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        ports = [(await stack.enter_async_context(serving_verifier(one))).port for one in verifiers]
        drafter_ports = [(await stack.enter_async_context(serving_drafter(one))).port for one in drafters]
        names.addresses = {"verifier": [f"127.0.0.1:{ports[0]}"], "drafter": [f"127.0.0.1:{drafter_ports[0]}"]}
        backends, stub = await stack.enter_async_context(gateway(names))
        await until(lambda: backends.verifiers.num_ready == 1 and backends.drafters.num_ready == 1)

        async def keep_asking() -> int:
            number = 0
            while not is_over.is_set():
                assert await ask(stub) == TEXT
                number += 1
            return number

        is_over = asyncio.Event()
        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        names.addresses["verifier"].append(f"127.0.0.1:{ports[1]}")
        names.addresses["drafter"].append(f"127.0.0.1:{drafter_ports[1]}")
        await until(lambda: backends.verifiers.num_ready == 2 and backends.drafters.num_ready == 2)
        del names.addresses["verifier"][0], names.addresses["drafter"][0]
        await until(lambda: backends.verifiers.num_ready == 1 and backends.drafters.num_ready == 1)
        await until(lambda: verifiers[0].streams.num_open == 0)
        await until(lambda: drafters[1].streams.num_rounds > 0)
        is_over.set()
        assert min(await asyncio.gather(*asking)) > 0


async def test_a_call_that_begins_after_its_peer_has_left_finds_it_lost() -> None:
    """Whoever chose a verifier just before it left goes on elsewhere, as with any that is lost."""
    names = Names()
    async with serving_verifier(FakeVerifier(MODEL)) as one, serving_verifier(FakeVerifier(MODEL)) as other:
        names.addresses = {"verifier": [f"127.0.0.1:{one.port}"], "drafter": []}
        async with gateway(names) as (backends, stub):
            await until(lambda: backends.verifiers.num_ready == 1)
            (route,) = await backends.verifiers.best_first(CONTEXT)
            client = route.opener
            assert isinstance(client, VerifierClient)
            names.addresses["verifier"] = [f"127.0.0.1:{other.port}"]
            await until(lambda: client not in backends.verifiers._peers.clients)
            await until(lambda: backends.verifiers.num_ready == 1)
            for begin in (
                lambda: client.info(),
                lambda: anext(client.prefill(_no_parts(), Deadline())),
                lambda: anext(client.watch(Deadline(), tenant="", request_id="r", name="")),
            ):
                with pytest.raises(Unavailable) as caught:
                    await begin()
                assert caught.value.reason == "VERIFIER_LOST"
            assert await client.health(1.0) is Health.NOT_SERVING
            assert await ask(stub) == TEXT


async def _no_parts() -> AsyncIterator[ContextSpec | MediaChunk]:
    return
    yield


async def test_a_name_that_is_not_resolved_keeps_its_peers() -> None:
    names = Names()
    names.addresses = {"drafter": []}
    async with serving_verifier(FakeVerifier(MODEL)) as server:
        names.addresses["verifier"] = [f"127.0.0.1:{server.port}"]
        async with gateway(names) as (backends, stub):
            await until(lambda: backends.verifiers.num_ready == 1)
            names.fails = True
            await asyncio.sleep(0.1)
            assert backends.verifiers.num_ready == 1
            assert await ask(stub) == TEXT


async def test_an_addresss_certificate_must_carry_the_name_that_led_to_it() -> None:
    names = Names()
    names.addresses = {"engine.foveate": ["10.0.0.1:5", "10.0.0.2:5"]}
    tls = ClientTls()
    peers = Peers(["dns:engine.foveate:5"], lambda channel: channel, tls=tls, resolve=names)
    assert peers._tls_of("dns:engine.foveate:5") == ClientTls(server_name="engine.foveate")
    await peers.refresh()
    assert len(peers.clients) == 2
    assert peers.may_grow
    await peers.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_the_systems_resolver(host: str) -> None:
    peers = Peers([f"dns:{host}:5"], lambda channel: object())
    await peers.refresh()
    assert peers.clients
    await peers.close()
