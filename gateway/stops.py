"""Where an answer ends: the one place that knows about end-of-answer tokens, length, and stop strings.

Tokens come in blocks, as rounds commit them, and are looked at one by one, so the end does not depend on how the answer
was cut into rounds:

    end-of-answer token   the answer ends before it; it is not sent
    stop string           the answer ends before the first that completes; what may become one is held back
    max_tokens            the answer ends after that many tokens

Within the first `min_tokens` neither ends it: a stop string that completes there is text like any other, and an
end-of-answer token, which the verifier does not choose there but a loose policy may keep, has no text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gateway.detokenizer import Detokenizer
from gateway.policies import LOOSE_ORIGINS
from gateway.values import Delta, FinishReason, TextToken, Token


@dataclass(frozen=True)
class _Held:
    """A token that is not sent yet; `is_whole` is false inside a character, and at such a place nothing may end."""

    token: TextToken
    is_whole: bool


class Output:
    """The text side of one answer. `commit` takes what a round committed and returns what may be sent of it."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        eos_token_ids: frozenset[int],
        max_tokens: int,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.num_committed = 0  # tokens of the answer so far, sent, held or cut; the end-of-answer token included
        self.num_sent = 0
        self.loose_positions: list[int] = []  # places among the sent tokens where the target chose another
        self._detokenizer = detokenizer
        self._eos_token_ids = eos_token_ids
        self._max_tokens = max_tokens
        self._stop = stop
        self._min_tokens = min_tokens
        self._held: list[_Held] = []

    @property
    def remaining(self) -> int:
        """How many tokens the answer has room for."""
        return self._max_tokens - self.num_committed

    def commit(self, tokens: Iterable[Token]) -> Delta:
        """Takes tokens up to the end of the answer, if it is among them, and returns those whose text is certain."""
        for token in tokens:
            self._take(token)
            if self.finish_reason is not None:
                break
        return self._release()

    def _take(self, token: Token) -> None:
        self.num_committed += 1
        if token.id in self._eos_token_ids and self.num_committed > self._min_tokens:
            self._finish(FinishReason.EOS)
            return
        text = self._detokenizer.push(token.id)
        self._held.append(_Held(TextToken(token.id, token.origin, text, token.place), self._detokenizer.is_whole))
        if self._cut_at_stop_string():
            self.finish_reason = FinishReason.STOP
        elif self.remaining <= 0:
            self._finish(FinishReason.LENGTH)

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        tail = self._detokenizer.flush()
        if tail and self._held:
            last = self._held[-1].token
            self._held[-1] = _Held(replace(last, text=last.text + tail), is_whole=True)
            if self._cut_at_stop_string():
                self.finish_reason = FinishReason.STOP

    def _cut_at_stop_string(self) -> bool:
        """Drops the stop string that the last token completed, the first of them, and everything after it.

        Returns whether there was one. What earlier tokens completed was looked at with them.
        """
        if not self._stop or self.num_committed <= self._min_tokens:
            return False
        text = self._held_text()
        old_len = len(text) - len(self._held[-1].token.text)
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, old_len - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return False
        _, end = min(found)
        kept: list[_Held] = []
        start = 0
        for held in self._held:
            if start >= end:
                break
            kept.append(_Held(replace(held.token, text=held.token.text[: end - start]), is_whole=True))
            start += len(held.token.text)
        self._held = kept
        return True

    def _release(self) -> Delta:
        """Sends held tokens up to the last place where a character is whole and no stop string may have begun."""
        certain_len = len(self._held_text())
        if self.finish_reason is None:
            certain_len -= self._stop_prefix_len()
        num_released, end = 0, 0
        for index, held in enumerate(self._held):
            end += len(held.token.text)
            if end > certain_len:
                break
            if held.is_whole or self.finish_reason is not None:
                num_released = index + 1
        released = tuple(held.token for held in self._held[:num_released])
        del self._held[:num_released]
        positions = enumerate(released, start=self.num_sent)
        self.loose_positions += [position for position, token in positions if token.origin in LOOSE_ORIGINS]
        self.num_sent += len(released)
        return Delta(released)

    def _stop_prefix_len(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        text = self._held_text()
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop if len(stop) > length):
                return length
        return 0

    def _held_text(self) -> str:
        return "".join(held.token.text for held in self._held)
