"""Starts a verifier: python -m verifier_svc.main --model PATH."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.device_thread import DeviceThread
from engine.loading import ModelError
from foveate.rpc.server import Server, ServiceRegistration, running, wait_for_signal
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


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verifier_svc.main", description="The dense verifier of Foveate.")

    def flag(name: str, kind: Callable[[str], Any], default: object, text: str) -> None:
        variable = "FOVEATE_" + name.replace("-", "_").upper()
        value = environment.get(variable, default)
        shown = "" if value is None else f" (default {value})"
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"{text}{shown}; ${variable}")

    config, media = VerifierConfig(Path()), MediaLimits()
    flag("model", Path, None, "folder of the checkpoint")
    flag("address", str, config.address, "host:port to listen on; port 0 picks a free one")
    flag("media-root", Path, None, "folder whose videos clients may name by path")
    flag("pool-mib", _positive, config.pool_bytes // MIB, "KV pool in MiB")
    flag("device", str, config.device, "cpu or cuda")
    flag("dtype", str, config.dtype, "float32, bfloat16 or float16")
    flag("threads", _positive, config.num_threads, "CPU threads of the model and of each decoder")
    flag("default-fps", _rate, media.default_fps, "frames per second to look at when the client does not say")
    flag("max-upload-mib", _positive, media.max_upload_bytes // MIB, "largest upload in MiB")
    flag("max-frames", _positive, media.max_frames, "most frames of a video")
    flag("max-visual-tokens", _positive, media.max_visual_tokens, "most visual tokens of a video")
    flag("max-thread-tokens", _positive, config.max_thread_tokens, "most tokens of history, question and answer")
    is_deterministic = environment.get("FOVEATE_DETERMINISTIC", "").lower() in ("1", "true", "yes")
    text = "bit-stable kernels, whatever block of tokens is computed; $FOVEATE_DETERMINISTIC"
    parser.add_argument("--deterministic", action="store_true", default=is_deterministic, help=text)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate <= 60:
        raise argparse.ArgumentTypeError("must be in (0, 60]")
    return rate


async def serve(config: VerifierConfig) -> None:
    """Serves until SIGTERM or SIGINT: NOT_SERVING while loading, then SERVING, then drains."""
    servicer = VerifierServicer()
    registration = ServiceRegistration(
        SERVICE_NAME, lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)
    )
    stop = asyncio.create_task(wait_for_signal())
    device = DeviceThread()
    try:
        async with running(Server([registration], address=config.address), grace_s=config.drain_grace_s) as server:
            loading = asyncio.create_task(Verifier.load(config, device))
            await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                return
            verifier = loading.result()
            try:
                servicer.serve(verifier)
                await server.set_serving(True)
                sys.stdout.write(f"READY {server.port}\n")
                sys.stdout.flush()
                await stop
                await server.stop(config.drain_grace_s)
            finally:
                await verifier.close()
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
        sys.stderr.write(f"verifier: {error}\n".replace("\n", " ").strip() + "\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
