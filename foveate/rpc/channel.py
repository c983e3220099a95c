"""Client channels with the options every Foveate hop shares."""

from __future__ import annotations

import json

import grpc

from foveate.rpc.security import ClientTls
from foveate.telemetry.rpc import CarryingInterceptor, Metadata, TracedChannel

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024

# Only calls that are safe to repeat are retried, and only when no server took them.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [
                    {"service": "foveate.v1.ContextService", "method": "GetContext"},
                    {"service": "foveate.v1.ContextService", "method": "ListContexts"},
                    {"service": "foveate.v1.AnswerService", "method": "GetServerInfo"},
                    {"service": "foveate.v1.VerifierService", "method": "GetVerifierInfo"},
                    {"service": "foveate.v1.VerifierService", "method": "ListHeldContexts"},
                    {"service": "foveate.v1.DrafterService", "method": "GetDrafterInfo"},
                ],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "0.5s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.service_config", _SERVICE_CONFIG),
    # A peer that is frozen rather than dead answers no ping: its calls end as UNAVAILABLE after 40 s, not never.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Loopback services of one stack must never go through a proxy of the environment.
    ("grpc.enable_http_proxy", 0),
    # No subchannel is shared between a client that closes and one that lives on.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(target: str, tls: ClientTls | None = None, *, api_key: str | None = None) -> grpc.aio.Channel:
    """Opens a channel to `target` ("host:port" or "unix:/path"), plaintext without `tls`.

    Connecting happens on the first call. Calls carry the key, and the trace they are made in. Raises OSError when a TLS
    file cannot be read.
    """
    if tls is None:
        bare = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    else:
        bare = grpc.aio.secure_channel(target, tls.credentials(), options=(*CHANNEL_OPTIONS, *tls.options()))
    return TracedChannel(bare, _key_metadata(api_key))


def open_sync_channel(target: str, tls: ClientTls | None = None, *, api_key: str | None = None) -> grpc.Channel:
    """Opens a channel of gRPC's sync API; otherwise as `open_channel`."""
    if tls is None:
        bare = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    else:
        bare = grpc.secure_channel(target, tls.credentials(), options=(*CHANNEL_OPTIONS, *tls.options()))
    carrying: grpc.Channel = grpc.intercept_channel(bare, CarryingInterceptor(_key_metadata(api_key)))
    return carrying


def _key_metadata(api_key: str | None) -> Metadata:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
