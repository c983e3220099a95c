"""Redis addresses, the breaker, and framed records."""

from __future__ import annotations

import pickle

import pytest

from foveate.store.address import Endpoint, RedisAddress, Topology, parse_redis_url
from foveate.store.breaker import Breaker
from foveate.store.errors import Corrupt
from foveate.store.frame import Kind, pack, unpack
from foveate.v1 import records_pb2


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://localhost", RedisAddress(Topology.SINGLE, (Endpoint("localhost", 6379),))),
        (
            "rediss://me:s%40crat@h:7/3",
            RedisAddress(Topology.SINGLE, (Endpoint("h", 7),), "me", "s@crat", db=3, tls=True),
        ),
        ("redis://:pw@[::1]:6380", RedisAddress(Topology.SINGLE, (Endpoint("::1", 6380),), None, "pw")),
        ("unix:///run/redis.sock?db=2", RedisAddress(Topology.SINGLE, (Endpoint(unix_path="/run/redis.sock"),), db=2)),
        (
            "redis+sentinel://:pw@a,b:26380/main/1",
            RedisAddress(
                Topology.SENTINEL, (Endpoint("a", 26379), Endpoint("b", 26380)), None, "pw", db=1, service="main"
            ),
        ),
        ("redis+cluster://a:1,b:2", RedisAddress(Topology.CLUSTER, (Endpoint("a", 1), Endpoint("b", 2)))),
    ],
)
def test_urls(url: str, address: RedisAddress) -> None:
    parsed = parse_redis_url(url)
    assert parsed == address
    assert parsed.password is None or parsed.password not in f"{parsed} {parsed!r}"


@pytest.mark.parametrize(
    "url", ["", "http://a", "redis://", "redis://a:b", "redis://a,b", "redis+sentinel://a", "unix://", "redis://:pw@"]
)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ValueError, match="Redis URL"):
        parse_redis_url(url)


def test_the_breaker_lets_one_try_after_a_period() -> None:
    now = 0.0
    breaker = Breaker(5.0, clock=lambda: now)
    assert breaker.admits()
    breaker.failed()
    assert not breaker.admits()
    now = 5.1
    assert breaker.admits()
    assert not breaker.admits()  # the others do not wait for the one who tries
    breaker.failed()
    now = 10.0
    assert not breaker.admits()
    now = 10.2
    assert breaker.admits()
    breaker.abandoned()
    assert breaker.admits()
    breaker.succeeded()
    assert breaker.admits()
    assert (breaker.is_open, breaker.num_opened) == (False, 1)


RECORD = records_pb2.ContextRecord(context_id="ab" * 32, tenant="us")


def test_records_come_back() -> None:
    assert unpack(Kind.CONTEXT, pack(Kind.CONTEXT, RECORD), records_pb2.ContextRecord) == RECORD


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    data = pack(Kind.CONTEXT, RECORD)
    for place in range(len(data)):
        for wrong in (data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :], data[:place]):
            with pytest.raises(Corrupt):
                unpack(Kind.CONTEXT, wrong, records_pb2.ContextRecord)
    with pytest.raises(Corrupt):
        unpack(Kind.CONTEXT, data + b"x", records_pb2.ContextRecord)


def test_no_record_is_taken_for_another_kind_and_nothing_is_unpickled() -> None:
    with pytest.raises(Corrupt):
        unpack(Kind.MANIFEST, pack(Kind.CONTEXT, RECORD), records_pb2.ColdManifest)
    with pytest.raises(Corrupt):
        unpack(Kind.CONTEXT, pickle.dumps(RECORD.SerializeToString() * 9), records_pb2.ContextRecord)
