"""The flags of a service that registers, and the address that it gives."""

from __future__ import annotations

import pytest

from foveate.registration import (
    RegistrationConfig,
    _reachable,
    add_redis_flags,
    add_registration_flags,
    redis_settings,
    registration_config,
)
from foveate.rpc.process import FlagParser
from foveate.store.address import parse_redis_url
from foveate.store.client import StoreSettings


def parsed(arguments: list[str], environment: dict[str, str] | None = None) -> RegistrationConfig | None:
    parser = FlagParser("service", "A service.", environment or {})
    add_redis_flags(parser, "the Redis")
    add_registration_flags(parser)
    options = parser.parse_args(arguments)
    assert (redis_settings(options) is None) == (not options.redis)
    return registration_config(options)


def test_it_registers_when_it_is_told_to() -> None:
    assert parsed([]) is None
    assert parsed(["--redis", "redis://r"]) is None
    found = parsed(
        ["--redis", "redis://r", "--register", "h"], {"FOVEATE_FLEET": "blue", "FOVEATE_REDIS_BREAKER_S": "7"}
    )
    assert found is not None
    assert (found.address, found.fleet, found.redis.breaker_s) == ("h", "blue", 7)
    assert found.redis.address == parse_redis_url("redis://r")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--register", "h"], "--redis"),
        (["--redis", "x://r", "--register", "h"], "--redis"),
        (["--redis", "redis://r", "--register", "h", "--fleet", "a b"], "--fleet"),
        (["--redis", "redis://r", "--register", "h", "--fleet", "{a}"], "--fleet"),
    ],
)
def test_flags_that_do_not_fit(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(arguments)


@pytest.mark.parametrize(
    ("told", "redis", "address"),
    [
        ("h", "redis://r", "h:5"),
        ("h:7", "redis://r", "h:7"),
        ("[::1]", "redis://r", "[::1]:5"),
        ("[::1]:7", "redis://r", "[::1]:7"),
        ("auto", "redis://127.0.0.1:1", "127.0.0.1:5"),
        ("auto", "unix:///run/redis.sock", "127.0.0.1:5"),
    ],
)
def test_the_address_that_is_registered(told: str, redis: str, address: str) -> None:
    config = RegistrationConfig(StoreSettings(parse_redis_url(redis)), told)
    assert _reachable(config, 5) == address
