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
from foveate.rpc.process import FlagParser, log_to_stderr, positive, run_service, serve_loaded
from foveate.rpc.server import Server, ServiceRegistration
from foveate.v1 import verifier_pb2_grpc
from verifier_svc.config import MIB, MediaLimits, VerifierConfig
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
        num_threads=flags.threads,
        deterministic=flags.deterministic,
        max_thread_tokens=flags.max_thread_tokens,
        media=MediaLimits(
            max_upload_bytes=flags.max_upload_mib * MIB,
            max_frames=flags.max_frames,
            max_visual_tokens=flags.max_visual_tokens,
            default_fps=flags.default_fps,
        ),
    )


def _parser(environment: Mapping[str, str]) -> FlagParser:
    parser = FlagParser("verifier_svc.main", "The dense verifier of Foveate.", environment)
    config, media = VerifierConfig(Path()), MediaLimits()
    parser.flag("model", Path, None, "folder of the checkpoint")
    parser.flag("address", str, config.address, "host:port to listen on; port 0 picks a free one")
    parser.flag("media-root", Path, None, "folder whose videos clients may name by path")
    parser.flag("pool-mib", positive, config.pool_bytes // MIB, "KV pool in MiB")
    parser.flag("device", str, config.device, "cpu or cuda")
    parser.flag("dtype", str, config.dtype, "float32, bfloat16 or float16")
    parser.flag("threads", positive, config.num_threads, "CPU threads of the model and of each decoder")
    parser.flag("default-fps", _rate, media.default_fps, "frames per second to look at when the client does not say")
    parser.flag("max-upload-mib", positive, media.max_upload_bytes // MIB, "largest upload in MiB")
    parser.flag("max-frames", positive, media.max_frames, "most frames of a video")
    parser.flag("max-visual-tokens", positive, media.max_visual_tokens, "most visual tokens of a video")
    parser.flag("max-thread-tokens", positive, config.max_thread_tokens, "most tokens of history, question and answer")
    parser.switch("deterministic", "bit-stable kernels also where the compiled one, which always is, cannot be built")
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
    with contextlib.closing(DeviceThread()) as device:
        server = Server([registration], address=config.address)
        await serve_loaded(server, lambda: Verifier.load(config, device), servicer.serve, grace_s=config.drain_grace_s)


def main() -> int:
    """Runs the command; returns its exit status."""
    log_to_stderr()
    config = parse_config(sys.argv[1:], os.environ)
    return run_service("verifier", lambda: serve(config), failures=(ModelError,))


if __name__ == "__main__":
    raise SystemExit(main())
