"""The gateway process: flags, server, drain. `python -m gateway.main --help`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from foveate.registration import add_redis_flags, redis_settings
from foveate.rpc.admission import Admission, AdmissionInterceptor, AdmissionLimits
from foveate.rpc.process import FlagParser, positive, run_service, say_failure, say_ready
from foveate.rpc.security import ApiKeys, is_loopback
from foveate.rpc.server import Server, ServiceRegistration, running, wait_for_signal
from foveate.rpc.serving import add_peer_flags, add_serving_flags, peer_tls, serving_config
from foveate.telemetry.logs import log_to_stderr
from foveate.v1 import answers_pb2_grpc, contexts_pb2_grpc
from gateway.backends import Backends, connected
from gateway.config import GatewayConfig
from gateway.observing import Observer, observe
from gateway.servicer import AnswerServicer, ContextServicer
from gateway.tenants import Tenants
from gateway.values import AcceptancePolicy

# The calls that cost something; the others only look.
WORKING = frozenset({"/foveate.v1.AnswerService/Ask", "/foveate.v1.ContextService/CreateContext"})

logger = logging.getLogger(__name__)

_POLICY_NAMES = ", ".join(policy.name.lower().replace("_", "-") for policy in AcceptancePolicy)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT.

    Returns the exit status: 0 after draining, 1 when the address cannot be had, 2 when a setting is wrong.
    """
    log_to_stderr("gateway")
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv, os.environ)
    except ValueError as error:
        say_failure("gateway", error)
        return 2
    return run_service("gateway", lambda: serve(config), telemetry=config.serving.telemetry)


async def serve(config: GatewayConfig) -> None:
    """Serves until a signal; SERVING while there is a verifier."""
    if not is_loopback(config.address) and config.api_keys is None:
        logger.warning("%s can be reached from elsewhere and asks for no API key (--api-keys)", config.address)
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
    tenants = Tenants(config.tenant_header)
    answers = AnswerServicer(backends, Observer(), tenants)
    contexts = ContextServicer(backends, tenants)
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
    serving, admission = config.serving, Admission(config.admission)
    observe(backends, admission)
    keys = None if config.api_keys is None else ApiKeys.load(config.api_keys)
    return Server(
        registrations,
        address=config.address,
        tls=serving.tls,
        use_reflection=serving.use_reflection,
        interceptors=(AdmissionInterceptor(admission, WORKING, keys, until_ready=backends.verifiers.queue.wait),),
    )


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> GatewayConfig:
    """Returns the settings of the command line; defaults come from FOVEATE_*. Raises ValueError when one is wrong."""
    defaults = GatewayConfig(verifier="unset")
    parser = FlagParser("gateway.main", "Foveate's gateway: rounds, text, public services.", environment)
    flag = parser.flag
    flag(
        "verifier",
        str,
        "",
        "HOST:PORT of the verifier (required), dns:HOST:PORT, or redis:FLEET for who registers; several with commas",
    )
    flag(
        "drafter",
        str,
        "",
        "HOST:PORT, dns:HOST:PORT or redis:FLEET, several with commas; without it drafts are n-grams",
    )
    flag("address", str, defaults.address, "host:port to listen on; port 0 picks a free one")
    flag("default-max-tokens", int, defaults.default_max_tokens, "tokens of an answer when the request does not say")
    flag("default-num-draft-tokens", int, defaults.default_num_draft_tokens, "draft tokens per round, 1 to 16")
    parser.switch("fixed-draft-length", "draft the default number of tokens in every round, rather than what pays most")
    flag("default-visual-budget", float, defaults.default_visual_budget, "share of visual tokens the drafter keeps")
    flag("default-small-budget", float, defaults.default_small_budget, "share that a small draft model's video keeps")
    flag("default-policy", str, "exact", f"acceptance of drafts when the request does not say: {_POLICY_NAMES}")
    flag("allowed-policies", str, "all", "comma-separated policies that requests may ask for, or all")
    flag("max-lambda", float, defaults.max_lambda, "largest share of loosely kept draft tokens a request may ask for")
    flag("max-tokens-ceiling", int, defaults.max_tokens_ceiling, "most tokens a request may ask for")
    flag("draft-timeout-ms", float, defaults.draft_timeout_s * 1e3, "least time to wait for a draft")
    flag("attach-timeout-ms", float, defaults.attach_timeout_s * 1e3, "time to wait for a drafter to attach")
    flag("health-timeout-ms", float, defaults.health_timeout_s * 1e3, "silence after which a verifier counts as hung")
    limits = defaults.admission
    flag("api-keys", Path, None, "file of TENANT SHA256 lines (foveate new-key); without it anybody may ask")
    flag("max-running", positive, limits.max_running, "answers and uploads at once; others wait")
    flag("max-waiting", positive, limits.max_waiting, "calls that may wait; others are refused")
    flag("max-running-per-tenant", int, limits.max_running_per_tenant, "of those, a tenant's; 0: no bound")
    flag("max-per-second-per-tenant", float, limits.max_per_second_per_tenant, "calls a tenant may begin; 0: no bound")
    flag("verifier-wait-s", float, defaults.verifier_wait_s, "wait for a verifier of a call without a deadline")
    flag("failover-wait-s", float, defaults.failover_wait_s, "time that an answer waits for another verifier")
    add_redis_flags(parser, "URL of the Redis of registry, conversations and redis:; without it they are in memory")
    flag("conversation-ttl-s", float, defaults.conversation_ttl_s, "seconds that a conversation is kept")
    flag("tenant-header", str, "", "metadata key in which a trusted proxy names the tenant; without it there is one")
    add_serving_flags(parser)
    add_peer_flags(parser)
    options = parser.parse_args(arguments)
    return GatewayConfig(
        verifier=options.verifier,
        drafter=options.drafter or None,
        address=options.address,
        default_max_tokens=options.default_max_tokens,
        default_num_draft_tokens=options.default_num_draft_tokens,
        adapts_draft_length=not options.fixed_draft_length,
        default_visual_budget=options.default_visual_budget,
        default_small_budget=options.default_small_budget,
        default_policy=_policy("--default-policy", options.default_policy),
        allowed_policies=_policies(options.allowed_policies),
        max_lambda=options.max_lambda,
        max_tokens_ceiling=options.max_tokens_ceiling,
        draft_timeout_s=options.draft_timeout_ms / 1e3,
        attach_timeout_s=options.attach_timeout_ms / 1e3,
        verifier_wait_s=options.verifier_wait_s,
        health_timeout_s=options.health_timeout_ms / 1e3,
        failover_wait_s=options.failover_wait_s,
        redis=redis_settings(options),
        conversation_ttl_s=options.conversation_ttl_s,
        tenant_header=options.tenant_header.lower(),
        serving=serving_config("gateway", options, options.address, environment),
        peer_tls=peer_tls(options),
        api_keys=options.api_keys,
        admission=AdmissionLimits(
            options.max_running,
            options.max_waiting,
            options.max_running_per_tenant,
            options.max_per_second_per_tenant,
        ),
    )


def _policy(flag: str, name: str) -> AcceptancePolicy:
    key = name.strip().upper().replace("-", "_")
    if key not in AcceptancePolicy.__members__:
        raise ValueError(f"{flag}: {name!r} is not a policy; known are {_POLICY_NAMES}")
    return AcceptancePolicy[key]


def _policies(names: str) -> frozenset[AcceptancePolicy]:
    if names == "all":
        return frozenset(AcceptancePolicy)
    return frozenset(_policy("--allowed-policies", name) for name in names.split(","))


if __name__ == "__main__":
    raise SystemExit(main())
