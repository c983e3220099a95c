"""Token ids to text, one token at a time, never half a character."""

from __future__ import annotations

import tokenizers

_REPLACEMENT = "\ufffd"  # what decoding puts in place of bytes that are not, or not yet, a character


class Detokenizer:
    """Incremental decoding: the pieces of `push` and the last one of `flush` join to the decoding of all ids at once.

    A window of ids is decoded again with every token: from the last place where the text was whole, back to one such
    place earlier, so that decoders that treat the first token of a text differently see the same neighbours. Special
    tokens add no text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window_start = 0
        self._whole_len = 0  # ids before this index are out as text
        self._whole_text_len = 0  # length of the decoding of the window's ids before _whole_len

    @property
    def is_whole(self) -> bool:
        """True when no bytes wait for the rest of a character."""
        return self._whole_len == len(self._ids)

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became certain, maybe none."""
        self._ids.append(token_id)
        window = self._decode(self._window_start)
        if window.endswith(_REPLACEMENT):
            return ""
        return self._take(window)

    def flush(self) -> str:
        """Returns what is left, bytes that never became a character included (as U+FFFD)."""
        if self.is_whole:
            return ""
        return self._take(self._decode(self._window_start))

    def _take(self, window: str) -> str:
        text = window[self._whole_text_len :]
        self._window_start, self._whole_len = self._whole_len, len(self._ids)
        self._whole_text_len = len(self._decode(self._window_start))
        return text

    def _decode(self, start: int) -> str:
        decoded: str = self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)
        return decoded
