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
    Answer,
    AnswerStats,
    AskOptions,
    Context,
    Delta,
    DraftMode,
    FinishReason,
    Guarantee,
    Origin,
    Progress,
    ProgressCallback,
    Role,
    Selection,
    ServerInfo,
    ServerLimits,
    Stage,
    Turn,
)
from foveate.video import ContextTimings, VideoFacts

__all__ = [
    "Answer",
    "AnswerStats",
    "AnswerStream",
    "AskOptions",
    "AsyncAnswerStream",
    "AsyncClient",
    "Client",
    "Context",
    "ContextTimings",
    "Delta",
    "DraftMode",
    "FinishReason",
    "Guarantee",
    "Origin",
    "Progress",
    "ProgressCallback",
    "Role",
    "Selection",
    "ServerInfo",
    "ServerLimits",
    "Stage",
    "Turn",
    "VideoFacts",
]
