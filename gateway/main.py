"""The gateway process: flags, server, drain. `python -m gateway.main --help`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from foveate.rpc.process import FlagParser, log_to_stderr, run_service, say_failure, say_ready
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
    log_to_stderr()
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv, os.environ)
    except ValueError as error:
        say_failure("gateway", error)
        return 2
    return run_service("gateway", lambda: serve(config))


async def serve(config: GatewayConfig) -> None:
    """Serves until a signal; SERVING while there is a verifier."""
    async with connected(config) as backends, running(make_server(config, backends), grace_s=config.drain_s) as server:
        following = asyncio.create_task(backends.follow(server.set_serving))
        stopping = asyncio.create_task(wait_for_signal())
        say_ready(server.port)
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


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> GatewayConfig:
    """Returns the settings of the command line; defaults come from FOVEATE_*. Raises ValueError when one is wrong."""
    defaults = GatewayConfig(verifier="unset")
    parser = FlagParser("gateway.main", "Foveate's gateway: rounds, text, public services.", environment)
    flag = parser.flag
    flag("verifier", str, "", "HOST:PORT of the verifier (required)")
    flag("drafter", str, "", "HOST:PORT of the drafter; without it drafts are n-grams")
    flag("address", str, defaults.address, "host:port to listen on; port 0 picks a free one")
    flag("default-max-tokens", int, defaults.default_max_tokens, "tokens of an answer when the request does not say")
    flag("default-num-draft-tokens", int, defaults.default_num_draft_tokens, "draft tokens per round, 1 to 16")
    flag("default-visual-budget", float, defaults.default_visual_budget, "share of visual tokens the drafter keeps")
    flag("max-tokens-ceiling", int, defaults.max_tokens_ceiling, "most tokens a request may ask for")
    flag("draft-timeout-ms", float, defaults.draft_timeout_s * 1e3, "least time to wait for a draft")
    flag("attach-timeout-ms", float, defaults.attach_timeout_s * 1e3, "time to wait for a drafter to attach")
    options = parser.parse_args(arguments)
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


if __name__ == "__main__":
    raise SystemExit(main())
