"""Prompt lookup: drafts copied from what followed the same few tokens earlier in the prompt or the answer."""

from __future__ import annotations

from collections.abc import Iterable

MAX_NGRAM = 3


class NgramIndex:
    """Where every run of 1 to MAX_NGRAM tokens last ended, with something after it; constant work per token."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids: list[int] = []
        self._follower: dict[tuple[int, ...], int] = {}  # run -> index of the token that followed its last occurrence
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds tokens at the end; the runs that end just before each of them become findable."""
        for token_id in token_ids:
            end = len(self._ids)
            for length in range(1, min(MAX_NGRAM, end) + 1):
                self._follower[tuple(self._ids[end - length :])] = end
            self._ids.append(token_id)

    def propose(self, num_draft_tokens: int) -> tuple[int, ...]:
        """Returns up to `num_draft_tokens` tokens that followed the longest earlier occurrence of the current end."""
        for length in range(min(MAX_NGRAM, len(self._ids)), 0, -1):
            start = self._follower.get(tuple(self._ids[-length:]))
            if start is not None:
                return self._continue(start, num_draft_tokens)
        return ()

    def _continue(self, start: int, num_draft_tokens: int) -> tuple[int, ...]:
        """Copies from `start`; past the end it goes on with its own copies, which repeats a loop."""
        period = len(self._ids) - start
        return tuple(self._ids[start + offset % period] for offset in range(num_draft_tokens))
