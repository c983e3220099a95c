"""Everything that is done to the services, by name."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from bench.chaos.world import GATEWAYS, VERIFIERS, World
from bench.fault_proxy import FaultProxy, Faults

# How often each is drawn after every one has been once; 1 unless it is here.
WEIGHTS = {"cut": 6, "corrupt": 6, "delay": 4, "slow drafter": 3, "half-open": 3, "kill gateway": 2, "kill verifier": 2}
NEED_PRIVATE = ("full disk", "full /dev/shm")


def faults_of(world: World, chance: random.Random) -> dict[str, Callable[[], None]]:
    """Returns what can be done to the world here."""

    def somewhere() -> FaultProxy:
        return chance.choice(list(world.proxies.values()))

    def with_faults(proxy: FaultProxy, faults: Faults, for_s: float) -> None:
        proxy.faults = faults
        time.sleep(for_s)
        proxy.faults = Faults()
        if faults.is_silent:
            proxy.cut()

    faults: dict[str, Callable[[], None]] = {
        "cut": lambda: somewhere().cut(),
        "corrupt": lambda: with_faults(somewhere(), Faults(num_to_corrupt=3), 0.5),
        "delay": lambda: with_faults(somewhere(), Faults(delay_s=0.05), 2.0),
        "slow drafter": lambda: with_faults(world.proxies["drafter"], Faults(delay_s=0.5), 3.0),
        "half-open": lambda: with_faults(somewhere(), Faults(is_silent=True), 3.0),
        "half-open for good": lambda: somewhere().forget(),
        "kill gateway": lambda: world.kill(chance.choice(GATEWAYS)),
        "kill drafter": lambda: world.kill("drafter"),
        "kill verifier": lambda: world.kill(chance.choice(VERIFIERS)),
        "verifier leaves": lambda: world.leave(chance.choice(VERIFIERS), 3.0),
        "freeze gateway": lambda: world.freeze(chance.choice(GATEWAYS), 10.0),
        "freeze drafter": lambda: world.freeze("drafter", 10.0),
        "freeze verifier": lambda: world.freeze(chance.choice(VERIFIERS), 10.0),
        "restart redis": world.restart_redis,
        "freeze redis": lambda: world.freeze_redis(3.0),
        "cut redis": world.redis_proxy.cut,
        "slow redis": lambda: with_faults(world.redis_proxy, Faults(delay_s=0.2), 3.0),
        "redis clock jumps": world.jump_redis_clock,
        "verifier's clock jumps": lambda: world.jump_clock(
            chance.choice(VERIFIERS), chance.choice((3600.0, -3600.0)), 6.0
        ),
        "gateway's clock jumps": lambda: world.jump_clock(
            chance.choice(GATEWAYS), chance.choice((3600.0, -3600.0)), 3.0
        ),
        "full disk": lambda: world.fill_disk(3.0),
        "full /dev/shm": lambda: world.start_without_shm(chance.choice(VERIFIERS)),
    }
    return faults if world.is_private else {name: one for name, one in faults.items() if name not in NEED_PRIVATE}
