"""Starts a drafter: python -m drafter_svc.main --model PATH."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import Drafter
from drafter_svc.servicer import DrafterServicer
from engine.device_thread import DeviceThread
from engine.loading import ModelError
from foveate.rpc.process import FlagParser, log_to_stderr, positive, run_service, serve_loaded
from foveate.rpc.server import Server, ServiceRegistration
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


def _parser(environment: Mapping[str, str]) -> FlagParser:
    parser = FlagParser("drafter_svc.main", "The sparse drafter of Foveate.", environment)
    config = DrafterConfig(Path())
    parser.flag("model", Path, None, "folder of the checkpoint: the verifier's own, to share its KV")
    parser.flag("address", str, config.address, "host:port to listen on; port 0 picks a free one")
    parser.flag("device", str, config.device, "cpu or cuda")
    parser.flag("dtype", str, config.dtype, "float32, bfloat16 or float16: the verifier's")
    parser.flag("threads", positive, config.num_threads, "CPU threads of the model")
    return parser


async def serve(config: DrafterConfig) -> None:
    """Serves until SIGTERM or SIGINT."""
    servicer = DrafterServicer()
    registration = ServiceRegistration(
        SERVICE_NAME, lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server)
    )
    with contextlib.closing(DeviceThread()) as device:
        server = Server([registration], address=config.address)
        await serve_loaded(server, lambda: Drafter.load(config, device), servicer.serve, grace_s=config.drain_grace_s)


def main() -> int:
    """Runs the command; returns its exit status."""
    log_to_stderr()
    config = parse_config(sys.argv[1:], os.environ)
    return run_service("drafter", lambda: serve(config), failures=(ModelError,))


if __name__ == "__main__":
    raise SystemExit(main())
