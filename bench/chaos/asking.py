"""Clients that do what docs/clients.md says: wait and try again what may pass, and create again what is gone."""

from __future__ import annotations

import random
import secrets
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.chaos.world import GATEWAYS, World
from foveate.rpc.errors import DeadlineExceeded, FoveateError, NotFound, ResourceExhausted, Unavailable

QUESTIONS = ("Describe the video.", "How many objects are there?", "Which colours are there?", "What happens first?")
ASK_TIMEOUT_S = 30.0
GIVE_UP_S = 240.0  # an answer that nobody gives for so long, retries included, has failed
_NEW_SHARE = 0.2  # of questions, on a file that nobody has seen: prefilled under whatever happens
_TOKENS = 64


@dataclass
class Tally:
    """What came out. `hung`: calls that outlived their deadline by more than ten seconds."""

    answers: int = 0
    wrong: int = 0
    hung: int = 0
    failed: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


Expected = Mapping[tuple[str, str], str]


def undisturbed(world: World, videos: Mapping[str, bytes]) -> Expected:
    """Returns the text of every question on every video, as it is when nothing happens."""
    with world.client(GATEWAYS[0], ASK_TIMEOUT_S) as client:
        texts = {}
        for name, data in videos.items():
            context = client.create_context_from_bytes(data, fps=4.0)
            for question in QUESTIONS:
                texts[name, question] = client.ask(context, question, max_tokens=_TOKENS).text
        return texts


class Asker:
    """One client thread: asks, compares, counts."""

    def __init__(self, world: World, videos: Mapping[str, bytes], expected: Expected, seed: int) -> None:
        self._videos = videos
        self._expected = expected
        self._chance = random.Random(seed)
        self._clients = [world.client(name, ASK_TIMEOUT_S) for name in GATEWAYS]

    def run(self, tally: Tally, stop: threading.Event) -> None:
        """Asks until `stop` is set."""
        while not stop.is_set():
            key = self._chance.choice(list(self._expected))
            text = self._answer(*key, tally)
            with tally.lock:
                if text is None:
                    tally.failed += 1
                    continue
                tally.answers += 1
                if text != self._expected[key]:
                    tally.wrong += 1
                    sys.stderr.write(f"WRONG {key}: {text!r}\n")
        for client in self._clients:
            client.close()

    def _answer(self, video: str, question: str, tally: Tally) -> str | None:
        give_up_s = time.monotonic() + GIVE_UP_S
        data = self._videos[video]
        if self._chance.random() < _NEW_SHARE:
            data = as_new(data)
        while time.monotonic() < give_up_s:
            client, start_s = self._chance.choice(self._clients), time.monotonic()
            try:
                context = client.create_context_from_bytes(data, fps=4.0)
                answer = client.ask(context, question, max_tokens=_TOKENS)
                tally.modes[answer.stats.draft_mode.name] += 1
                return answer.text
            except (Unavailable, NotFound, DeadlineExceeded, ResourceExhausted) as error:
                tally.retried[error.reason] += 1
                time.sleep(min(1.0, error.retry_after_s or 0.1))
            except FoveateError as error:  # nothing that a client should try again: a failure of ours
                sys.stderr.write(f"FAILED {video}, {question}: {error!r}\n")
                return None
            finally:
                if time.monotonic() - start_s > 2 * ASK_TIMEOUT_S + 10:
                    tally.hung += 1
        sys.stderr.write(f"GIVEN UP {video}, {question}\n")
        return None


def as_new(mp4: bytes) -> bytes:
    """Returns a file with the same video that nobody has seen: an empty box with random bytes follows it."""
    filling = secrets.token_bytes(16)
    return mp4 + struct.pack(">I4s", 8 + len(filling), b"free") + filling
