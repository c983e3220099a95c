"""Starts a drafter: python -m drafter_svc.main --model PATH."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import Drafter
from drafter_svc.observing import observe
from drafter_svc.servicer import DrafterServicer
from engine.device_thread import DeviceThread
from engine.loading import ModelError
from engine.native.build import user_cache
from engine.placement import device_map_flag
from engine.service_record import service_record
from foveate.registration import add_redis_flags, add_registration_flags, registered, registration_config
from foveate.rpc.process import FlagParser, positive, run_service, say_failure, serve_loaded
from foveate.rpc.server import Server, ServiceRegistration
from foveate.rpc.serving import add_serving_flags, serving_config
from foveate.store.services import ServiceKind
from foveate.telemetry.logs import log_to_stderr
from foveate.v1 import drafter_pb2_grpc

SERVICE_NAME = "foveate.v1.DrafterService"


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> DrafterConfig:
    """Builds the config from flags, with defaults from FOVEATE_* variables; exits with a message when one is wrong."""
    parser = _parser(environment)
    flags = parser.parse_args(arguments)
    if flags.model is None and flags.small_model is None:
        parser.error("--model (or FOVEATE_MODEL) or --small-model must name a checkpoint folder")
    return DrafterConfig(
        model_path=flags.model,
        address=flags.address,
        device=flags.device,
        dtype=flags.dtype,
        device_map=flags.device_map,
        num_threads=flags.threads,
        kernel_cache=flags.kernel_cache,
        serving=serving_config("drafter", flags, flags.address, environment),
        registration=registration_config(flags),
        small_model_path=flags.small_model,
        layerskip_layers=flags.layerskip_layers,
        max_sequences=flags.max_sequences,
    )


def _parser(environment: Mapping[str, str]) -> FlagParser:
    parser = FlagParser("drafter_svc.main", "The drafter of Foveate.", environment)
    config = DrafterConfig(Path())
    parser.flag("model", Path, None, "folder of the checkpoint: the verifier's own, to share its KV")
    parser.flag("small-model", Path, None, "folder of a smaller checkpoint of the family, to read pruned videos")
    parser.flag("layerskip-layers", positive, None, "layers that draft before an early exit; half of them unless set")
    parser.flag("address", str, config.address, "host:port to listen on; port 0 picks a free one")
    parser.flag("device", str, config.device, "cpu or cuda")
    parser.flag("dtype", str, config.dtype, "float32, bfloat16, float16 or auto: the verifier's")
    parser.flag("device-map", device_map_flag, None, "spreads a large model: auto, balanced, JSON, or a file of it")
    parser.flag("threads", positive, config.num_threads, "CPU threads of the model")
    parser.flag("max-sequences", positive, config.max_sequences, "sequences open at once; more are refused")
    add_redis_flags(parser, "URL of the Redis to register in (--register); a drafter needs it for nothing else")
    add_registration_flags(parser)
    parser.flag("kernel-cache", Path, user_cache(environment), "folder, nobody else's, to keep the compiled kernel in")
    add_serving_flags(parser)
    return parser


async def serve(config: DrafterConfig) -> None:
    """Serves until SIGTERM or SIGINT."""
    servicer = DrafterServicer()
    registration = ServiceRegistration(
        SERVICE_NAME, lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server)
    )

    def start(drafter: Drafter) -> None:
        observe(drafter)
        servicer.serve(drafter)

    with contextlib.closing(DeviceThread()) as device:
        serving = config.serving
        server = Server([registration], address=config.address, tls=serving.tls, use_reflection=serving.use_reflection)
        await serve_loaded(
            server,
            lambda: Drafter.load(config, device),
            start,
            grace_s=config.drain_grace_s,
            announce=lambda drafter: registered(
                config.registration, ServiceKind.DRAFTER, server.port, service_record(drafter.main)
            ),
        )


def main() -> int:
    """Runs the command; returns its exit status."""
    log_to_stderr("drafter")
    try:
        config = parse_config(sys.argv[1:], os.environ)
    except ValueError as error:
        say_failure("drafter", error)
        return 2
    return run_service("drafter", lambda: serve(config), telemetry=config.serving.telemetry, failures=(ModelError,))


if __name__ == "__main__":
    raise SystemExit(main())
