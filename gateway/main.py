"""The gateway process: flags, server, drain. `python -m gateway.main --help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence

from foveate.rpc.server import Server, ServiceRegistration, running, wait_for_signal
from foveate.v1 import answers_pb2_grpc, contexts_pb2_grpc
from gateway.backends import Backends, connected
from gateway.config import GatewayConfig
from gateway.policies import ExactPolicy
from gateway.servicer import AnswerServicer, ContextServicer

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT.

    Returns the exit status: 0 after draining, 1 when the address cannot be had, 2 when a setting is wrong.
    """
    _log_to_stderr()
    try:
        config = parse_config(argv)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(config))
    except RuntimeError as error:
        logger.error("cannot serve on %s: %s", config.address, error)
        return 1
    return 0


async def serve(config: GatewayConfig) -> None:
    """Serves until a signal; SERVING while there is a verifier."""
    async with connected(config) as backends, running(make_server(config, backends), grace_s=config.drain_s) as server:
        following = asyncio.create_task(backends.follow(server.set_serving))
        stopping = asyncio.create_task(wait_for_signal())
        sys.stdout.write(f"READY {server.port}\n")
        sys.stdout.flush()
        try:
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
            logger.info("stopping on %s", stopping.result().name)
        finally:
            following.cancel()
            stopping.cancel()


def make_server(config: GatewayConfig, backends: Backends) -> Server:
    """Returns the server with the public services on it."""
    answers = AnswerServicer(backends, ExactPolicy())
    contexts = ContextServicer(backends)
    registrations = (
        ServiceRegistration(
            "foveate.v1.AnswerService",
            lambda server: answers_pb2_grpc.add_AnswerServiceServicer_to_server(answers, server),
        ),
        ServiceRegistration(
            "foveate.v1.ContextService",
            lambda server: contexts_pb2_grpc.add_ContextServiceServicer_to_server(contexts, server),
        ),
    )
    return Server(registrations, address=config.address)


def parse_config(argv: Sequence[str] | None) -> GatewayConfig:
    """Returns the settings of the command line; defaults come from FOVEATE_*. Raises ValueError when one is wrong."""
    defaults = GatewayConfig(verifier="unset")
    parser = argparse.ArgumentParser(
        prog="gateway.main", description="Foveate's gateway: rounds, text, public services."
    )
    flag = parser.add_argument
    flag("--verifier", default=_env("VERIFIER", ""), help="HOST:PORT of the verifier (required)")
    flag("--drafter", default=_env("DRAFTER", ""), help="HOST:PORT of the drafter; without it drafts are n-grams")
    flag("--address", default=_env("GATEWAY_ADDRESS", defaults.address), help="where to serve (default %(default)s)")
    for name, kind, default, text in (
        ("default-max-tokens", int, defaults.default_max_tokens, "tokens of an answer when the request does not say"),
        ("default-num-draft-tokens", int, defaults.default_num_draft_tokens, "draft tokens per round, 1 to 16"),
        ("default-visual-budget", float, defaults.default_visual_budget, "share of visual tokens the drafter keeps"),
        ("max-tokens-ceiling", int, defaults.max_tokens_ceiling, "most tokens a request may ask for"),
        ("draft-timeout-ms", float, defaults.draft_timeout_s * 1e3, "least time to wait for a draft"),
        ("attach-timeout-ms", float, defaults.attach_timeout_s * 1e3, "time to wait for a drafter to attach"),
    ):
        env_default = _env(name.replace("-", "_").upper(), str(default))
        flag(f"--{name}", type=kind, default=env_default, help=f"{text} (default %(default)s)")
    options = parser.parse_args(argv)
    return GatewayConfig(
        verifier=options.verifier,
        drafter=options.drafter or None,
        address=options.address,
        default_max_tokens=options.default_max_tokens,
        default_num_draft_tokens=options.default_num_draft_tokens,
        default_visual_budget=options.default_visual_budget,
        max_tokens_ceiling=options.max_tokens_ceiling,
        draft_timeout_s=options.draft_timeout_ms / 1e3,
        attach_timeout_s=options.attach_timeout_ms / 1e3,
    )


def _env(name: str, default: str) -> str:
    return os.environ.get(f"FOVEATE_{name}", default)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop, when it is installed, takes a tenth off each round trip."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        fields["message"] = record.getMessage()
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


if __name__ == "__main__":
    raise SystemExit(main())
