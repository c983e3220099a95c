"""Starts a drafter: python -m drafter_svc.main --model PATH."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import Drafter
from drafter_svc.servicer import DrafterServicer
from engine.device_thread import DeviceThread
from engine.loading import ModelError
from foveate.rpc.server import Server, ServiceRegistration, running, wait_for_signal
from foveate.v1 import drafter_pb2_grpc

SERVICE_NAME = "foveate.v1.DrafterService"


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> DrafterConfig:
    """Builds the config from flags, with defaults from FOVEATE_* variables; exits with a message when one is wrong."""
    parser = _parser(environment)
    flags = parser.parse_args(arguments)
    if flags.model is None:
        parser.error("--model (or FOVEATE_MODEL) must name a checkpoint folder")
    return DrafterConfig(
        model_path=flags.model,
        address=flags.address,
        device=flags.device,
        dtype=flags.dtype,
        num_threads=flags.threads,
    )


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drafter_svc.main", description="The sparse drafter of Foveate.")

    def flag(name: str, kind: Callable[[str], Any], default: object, text: str) -> None:
        variable = "FOVEATE_" + name.replace("-", "_").upper()
        value = environment.get(variable, default)
        shown = "" if value is None else f" (default {value})"
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"{text}{shown}; ${variable}")

    config = DrafterConfig(Path())
    flag("model", Path, None, "folder of the checkpoint: the verifier's own, to share its KV")
    flag("address", str, config.address, "host:port to listen on; port 0 picks a free one")
    flag("device", str, config.device, "cpu or cuda")
    flag("dtype", str, config.dtype, "float32, bfloat16 or float16: the verifier's")
    flag("threads", _positive, config.num_threads, "CPU threads of the model")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


async def serve(config: DrafterConfig) -> None:
    """Serves until SIGTERM or SIGINT: NOT_SERVING while loading, then SERVING, then drains."""
    servicer = DrafterServicer()
    registration = ServiceRegistration(
        SERVICE_NAME, lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server)
    )
    stop = asyncio.create_task(wait_for_signal())
    device = DeviceThread()
    try:
        async with running(Server([registration], address=config.address), grace_s=config.drain_grace_s) as server:
            loading = asyncio.create_task(Drafter.load(config, device))
            await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                return
            drafter = loading.result()
            servicer.serve(drafter)
            await server.set_serving(True)
            sys.stdout.write(f"READY {server.port}\n")
            sys.stdout.flush()
            await stop
            await server.stop(config.drain_grace_s)
            await drafter.close()
    finally:
        stop.cancel()
        device.close()


def main() -> None:
    """Runs the command; exits 1 with one line when the service cannot be started."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = parse_config(sys.argv[1:], os.environ)
    try:
        asyncio.run(serve(config))
    except (ModelError, OSError, RuntimeError, ValueError) as error:
        logging.getLogger(__name__).debug("start failed", exc_info=error)
        sys.stderr.write(f"drafter: {error}\n".replace("\n", " ").strip() + "\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
