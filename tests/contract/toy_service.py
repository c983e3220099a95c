"""A fake service as a process, for tests that kill it: `toy_service.py verifier|drafter PORT DELAY_S TEXT`."""

from __future__ import annotations

import asyncio
import sys

from foveate.rpc.server import wait_for_signal
from tests.fakes import FakeDrafter, FakeVerifier, ToyModel, serving_drafter, serving_verifier


async def main(role: str, port: str, delay_s: str, text: str) -> None:
    """Serves until a signal."""
    model = ToyModel.of(text)
    address = f"127.0.0.1:{port}"
    if role == "verifier":
        verifier = FakeVerifier(model)
        verifier.delay_s = float(delay_s)
        serving = serving_verifier(verifier, address)
    else:
        serving = serving_drafter(FakeDrafter(model), address)
    async with serving as server:
        sys.stdout.write(f"READY {server.port}\n")
        sys.stdout.flush()
        await wait_for_signal()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
