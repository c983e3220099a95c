"""Starts a verifier: python -m verifier_svc.main --model PATH."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.device_thread import DeviceThread
from engine.loading import ModelError
from engine.native.build import user_cache
from engine.placement import device_map_flag
from engine.service_record import service_record
from foveate.registration import (
    add_redis_flags,
    add_registration_flags,
    redis_settings,
    registered,
    registration_config,
)
from foveate.rpc.process import FlagParser, positive, run_service, say_failure, serve_loaded
from foveate.rpc.server import Server, ServiceRegistration
from foveate.rpc.serving import add_serving_flags, serving_config
from foveate.store.services import ServiceKind
from foveate.telemetry.logs import log_to_stderr
from foveate.v1 import verifier_pb2_grpc
from verifier_svc.config import MIB, ColdConfig, MediaLimits, VerifierConfig
from verifier_svc.fetching import FetchLimits
from verifier_svc.observing import observe
from verifier_svc.servicer import VerifierServicer
from verifier_svc.verifier import Verifier

SERVICE_NAME = "foveate.v1.VerifierService"


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> VerifierConfig:
    """Builds the config from flags, with defaults from FOVEATE_* variables; exits with a message when one is wrong."""
    parser = _parser(environment)
    flags = parser.parse_args(arguments)
    if flags.model is None:
        parser.error("--model (or FOVEATE_MODEL) must name a checkpoint folder")
    if flags.media_root is not None and not flags.media_root.is_dir():
        parser.error(f"--media-root: {flags.media_root} is not a folder")
    return VerifierConfig(
        model_path=flags.model,
        address=flags.address,
        media_root=flags.media_root,
        pool_bytes=flags.pool_mib * MIB,
        device=flags.device,
        dtype=flags.dtype,
        device_map=flags.device_map,
        num_threads=flags.threads,
        kernel_cache=flags.kernel_cache,
        deterministic=flags.deterministic,
        keep_visual_states=not flags.no_relevance,
        keep_patches=flags.keep_patches,
        max_thread_tokens=flags.max_thread_tokens,
        max_sequences=flags.max_sequences,
        context_ttl_s=flags.context_ttl_s,
        cold=_cold_config(flags),
        media=MediaLimits(
            max_upload_bytes=flags.max_upload_mib * MIB,
            max_frames=flags.max_frames,
            max_visual_tokens=flags.max_visual_tokens,
            max_decoder_bytes=flags.decoder_memory_mib * MIB,
            default_fps=flags.default_fps,
        ),
        fetch=FetchLimits(
            frozenset(host.strip().lower() for host in flags.fetch_hosts.split(",") if host.strip()),
            max_bytes=flags.max_upload_mib * MIB,
            max_s=flags.fetch_max_s,
        ),
        serving=serving_config("verifier", flags, flags.address, environment),
        registration=registration_config(flags),
    )


def _cold_config(flags: argparse.Namespace) -> ColdConfig | None:
    redis = redis_settings(flags)
    if redis is None:
        return None
    return ColdConfig(
        redis=redis,
        ttl_s=flags.context_ttl_s,
        max_bytes=flags.cold_max_mib * MIB,
        num_connections=flags.cold_connections,
        max_media_bytes=flags.cold_max_media_mib * MIB,
        int8=flags.cold_int8,
    )


def _parser(environment: Mapping[str, str]) -> FlagParser:
    parser = FlagParser("verifier_svc.main", "The dense verifier of Foveate.", environment)
    config, media = VerifierConfig(Path()), MediaLimits()
    parser.flag("model", Path, None, "folder of the checkpoint")
    parser.flag("address", str, config.address, "host:port to listen on; port 0 picks a free one")
    parser.flag("media-root", Path, None, "folder whose videos clients may name by path")
    parser.flag("pool-mib", positive, config.pool_bytes // MIB, "KV pool in MiB")
    parser.flag("device", str, config.device, "cpu or cuda")
    parser.flag("dtype", str, config.dtype, "float32, bfloat16, float16, or auto: what the checkpoint names")
    parser.flag("device-map", device_map_flag, None, "spreads a large model: auto, balanced, JSON, or a file of it")
    parser.flag("threads", positive, config.num_threads, "CPU threads of the model and of each decoder")
    parser.flag("default-fps", _rate, media.default_fps, "frames per second to look at when the client does not say")
    parser.flag("max-upload-mib", positive, media.max_upload_bytes // MIB, "largest upload in MiB")
    parser.flag("fetch-hosts", str, "", "hosts whose https URLs may be fetched, commas between; *.HOST: any below it")
    parser.flag("fetch-max-s", positive, int(config.fetch.max_s), "longest time for one URL in seconds")
    parser.flag("decoder-memory-mib", positive, media.max_decoder_bytes // MIB, "memory of a decoder process in MiB")
    parser.flag("max-frames", positive, media.max_frames, "most frames of a video")
    parser.flag("max-visual-tokens", positive, media.max_visual_tokens, "most visual tokens of a video")
    parser.flag("max-sequences", positive, config.max_sequences, "answers open at once; more are refused")
    parser.flag("max-thread-tokens", positive, config.max_thread_tokens, "most tokens of history, question and answer")
    parser.flag("context-ttl-s", positive, int(config.context_ttl_s), "seconds that an unused context is kept")
    add_redis_flags(parser, "URL of the Redis of the cold tier (docs/contexts.md); without it there is none")
    add_registration_flags(parser)
    parser.flag("cold-max-mib", positive, 16 * 1024, "cap on all cold copies together in MiB")
    parser.flag("cold-connections", positive, 4, "connections of a transfer")
    parser.flag("cold-max-media-mib", positive, 64, "largest video file that is kept in the cold tier in MiB")
    parser.switch("cold-int8", "write keys and values to the cold tier in eight bits, read such copies: answers say so")
    parser.switch("deterministic", "bit-stable kernels also where the compiled one, which always is, cannot be built")
    parser.switch("no-relevance", "keep no visual states with contexts: less memory, no policy that needs relevance")
    parser.flag("kernel-cache", Path, user_cache(environment), "folder, nobody else's, to keep the compiled kernel in")
    add_serving_flags(parser)
    parser.switch("keep-patches", "keep processed patches with contexts, for drafters with a small model of their own")
    return parser


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate <= 60:
        raise argparse.ArgumentTypeError("must be in (0, 60]")
    return rate


async def serve(config: VerifierConfig) -> None:
    """Serves until SIGTERM or SIGINT."""
    servicer = VerifierServicer()
    registration = ServiceRegistration(
        SERVICE_NAME, lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)
    )

    def start(verifier: Verifier) -> None:
        observe(verifier)
        servicer.serve(verifier)

    with contextlib.closing(DeviceThread()) as device:
        serving = config.serving
        server = Server([registration], address=config.address, tls=serving.tls, use_reflection=serving.use_reflection)
        await serve_loaded(
            server,
            lambda: Verifier.load(config, device),
            start,
            grace_s=config.drain_grace_s,
            announce=lambda verifier: registered(
                config.registration, ServiceKind.VERIFIER, server.port, service_record(verifier.parts.loaded)
            ),
        )


def main() -> int:
    """Runs the command; returns its exit status."""
    log_to_stderr("verifier")
    try:
        config = parse_config(sys.argv[1:], os.environ)
    except ValueError as error:
        say_failure("verifier", error)
        return 2
    return run_service("verifier", lambda: serve(config), telemetry=config.serving.telemetry, failures=(ModelError,))


if __name__ == "__main__":
    raise SystemExit(main())
