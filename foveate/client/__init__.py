"""The Python client, sync and async.

Three lines to ask:

    with Client("127.0.0.1:8080") as client:
        context = client.create_context("video.mp4")
        print(client.ask(context, "What happens?").text)

Errors are those of `foveate.rpc.errors`. `AsyncClient` has the same names with `await`.
"""

from foveate.client.aio import AsyncAnswerStream, AsyncClient
from foveate.client.sync import AnswerStream, Client
from foveate.client.types import (
    Acceptance,
    Answer,
    AnswerStats,
    AskOptions,
    Context,
    ContextState,
    Delta,
    DraftMode,
    FinishReason,
    FlyVariant,
    Guarantee,
    Origin,
    Policy,
    Pool,
    Progress,
    ProgressCallback,
    RelevanceInfo,
    Role,
    Selection,
    ServerInfo,
    ServerLimits,
    Stage,
    TokenDetail,
    TokenLogprobs,
    TopLogprob,
    Turn,
)
from foveate.context_source import ContextCost, ContextFetch, ContextSource
from foveate.video import ContextTimings, VideoFacts

__all__ = [
    "Acceptance",
    "Answer",
    "AnswerStats",
    "AnswerStream",
    "AskOptions",
    "AsyncAnswerStream",
    "AsyncClient",
    "Client",
    "Context",
    "ContextCost",
    "ContextFetch",
    "ContextSource",
    "ContextState",
    "ContextTimings",
    "Delta",
    "DraftMode",
    "FinishReason",
    "FlyVariant",
    "Guarantee",
    "Origin",
    "Policy",
    "Pool",
    "Progress",
    "ProgressCallback",
    "RelevanceInfo",
    "Role",
    "Selection",
    "ServerInfo",
    "ServerLimits",
    "Stage",
    "TokenDetail",
    "TokenLogprobs",
    "TopLogprob",
    "Turn",
    "VideoFacts",
]
