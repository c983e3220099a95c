"""What the end-to-end tests share: what the services hold, waiting, and answers that are long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from foveate.client import Answer, AskOptions, Client, Context, DraftMode
from foveate.rpc.channel import CHANNEL_OPTIONS
from foveate.stack import Stack
from foveate.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

MAX_THREAD_TOKENS = 512
POOL_MIB = 256
FPS = 4.0


@dataclass(frozen=True)
class Load:
    """What an engine service holds right now."""

    num_sequences: int
    pool_used_bytes: int


class Services:
    """Asks verifier and drafter themselves what they hold."""

    def __init__(self, stack: Stack) -> None:
        addresses = stack.addresses
        self._verifier_channel = grpc.insecure_channel(addresses.verifier, options=CHANNEL_OPTIONS)
        self._drafter_channel = grpc.insecure_channel(addresses.drafter or "", options=CHANNEL_OPTIONS)
        self._verifier = verifier_pb2_grpc.VerifierServiceStub(self._verifier_channel)
        self._drafter = drafter_pb2_grpc.DrafterServiceStub(self._drafter_channel)

    def verifier(self) -> Load:
        info = self._verifier.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=10)
        return Load(info.num_sequences, info.pool_used_bytes)

    def num_drafter_sequences(self) -> int:
        return int(self._drafter.GetDrafterInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=10).num_sequences)

    def close(self) -> None:
        self._verifier_channel.close()
        self._drafter_channel.close()


def wait_until(is_true: Callable[[], bool], limit_s: float) -> bool:
    """Polls until `is_true`, for at most `limit_s` seconds."""
    deadline_s = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def long_answer(client: Client, context: Context) -> tuple[Answer, AskOptions]:
    """Returns a plain answer of many tokens and the options that give it again: so hot that it hardly ever ends."""
    for seed in range(20):
        options = AskOptions(temperature=5.0, seed=seed, max_tokens=200)
        answer = client.ask(context, "Describe the video.", draft=DraftMode.OFF, **options)
        if answer.num_output_tokens == 200:
            return answer, options
    raise AssertionError("no seed gives a long answer")
