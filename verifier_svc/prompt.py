"""A conversation about a video as token ids, with people's words kept apart from the template's markup.

    context, one per video:  <|im_start|>system ... <|im_start|>user <|vision_start|> N x <|video_pad|> <|vision_end|>
    thread, one per answer:  question <|im_end|> ... <|im_start|>assistant

The context ends with the last placeholder, or the marker right behind it; what else a family puts before and between
its placeholders is in its VideoText.

The template is rendered with stand-ins for everything a person wrote. Markup is looked for in the template's own parts
only; a person's words are then put between, in one piece of text with the template's plain words around them, and
tokenised with special tokens switched off. Ordinary text so gets the ids it gets from transformers, and markup in a
question is plain text.

An answer may be given as the ids it was generated as: a tokenizer would often cut its text in another way, and the keys
and values that are kept of it would not be found again.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from engine.families import VideoText

_TEMPLATES_OWN = VideoText(())


class Role(Enum):
    """Who said a turn; the value is the chat template's word."""

    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Turn:
    """An earlier turn of the conversation; `token_ids` are those it was generated as, where they are known."""

    role: Role
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ThreadPrompt:
    """The thread's part of a prompt; `question_rows` are the rows that the question's own words fill.

    From row `answer_row` on come tokens of the answer that are committed already, where it goes on.
    """

    token_ids: tuple[int, ...]
    question_rows: range
    answer_row: int

    def followed_by(self, answer_token_ids: tuple[int, ...]) -> ThreadPrompt:
        """Returns the prompt of an answer that goes on after these tokens of it."""
        return replace(self, token_ids=self.token_ids + answer_token_ids)


@dataclass(frozen=True)
class _Rendered:
    token_ids: list[int]
    question_rows: range


@dataclass(frozen=True)
class _PlainText:
    """Text without markup; `question` is the run of characters in it that the question fills."""

    text: str = ""
    question: range = range(0)

    def plus(self, text: str, *, is_question: bool = False) -> _PlainText:
        start = len(self.text)
        return _PlainText(self.text + text, range(start, start + len(text)) if is_question else self.question)


class PromptBuilder:
    """Builds prompts of one checkpoint: its chat template, its tokenizer, its video placeholder."""

    def __init__(
        self,
        *,
        chat_template: str,
        tokenizer_json: bytes,
        special_tokens: Mapping[str, Any],
        video_token_id: int,
    ) -> None:
        self._template = chat_template
        self._special_tokens = dict(special_tokens)
        self._video_token_id = video_token_id
        self._plain = _plain_tokenizer(tokenizer_json)
        added = json.loads(tokenizer_json)["added_tokens"]
        self._markup_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        self._all_markup_ids = frozenset(self._markup_ids.values())
        longest_first = sorted(self._markup_ids, key=len, reverse=True)
        self._markup = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def context_token_ids(self, video: VideoText) -> list[int]:
        """Returns the ids of the context: system prompt, markers, and as many placeholders as the video has spans for.

        Raises ValueError when the chat template does not write a video as its family does.
        """
        rendered = self._render((), "", video).token_ids
        spans, token_ids = list(video.spans), list[int]()
        for token_id in rendered[: self._end_of_context(rendered)]:
            is_placeholder = token_id == self._video_token_id
            token_ids += [token_id] * (spans.pop(0) if is_placeholder and spans else 1)
        if spans:
            raise ValueError(f"the chat template leaves {len(spans)} runs of visual tokens without a placeholder")
        return token_ids

    def thread(self, history: Sequence[Turn], question: str) -> ThreadPrompt:
        """Returns the ids after the context, up to where the answer starts."""
        rendered = self._render(history, question)
        start = self._end_of_context(rendered.token_ids)
        words = rendered.question_rows
        rows = range(words.start - start, words.stop - start) if words else words
        token_ids = tuple(rendered.token_ids[start:])
        return ThreadPrompt(token_ids, rows, answer_row=len(token_ids))

    def _end_of_context(self, token_ids: list[int]) -> int:
        """Returns the length of the context in a rendered prompt. Raises ValueError when it has no video."""
        if self._video_token_id not in token_ids:
            raise ValueError("the chat template writes no video")
        end = len(token_ids) - token_ids[::-1].index(self._video_token_id)
        return end + (end < len(token_ids) and token_ids[end] in self._all_markup_ids)

    def _render(self, history: Sequence[Turn], question: str, video: VideoText = _TEMPLATES_OWN) -> _Rendered:
        said: list[str | tuple[int, ...]] = [self._generated(turn) or turn.text for turn in history]
        said.append(question)
        mark = secrets.token_hex(16)
        names = [f"{mark}:{index:06d}" for index in range(len(said))]
        roles = [*(turn.role for turn in history), Role.USER]
        messages: list[dict[str, Any]] = [
            {"role": role.value, "content": [{"type": "text", "text": name}]}
            for role, name in zip(roles, names, strict=True)
        ]
        messages[0]["content"].insert(0, {"type": "video"})
        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=self._template,
            add_generation_prompt=True,
            **self._special_tokens,
        )
        text = rendered[0].replace(video.replaced, video.markup, 1) if video.replaced else rendered[0]
        pieces = re.split(f"{mark}:([0-9]{{6}})", text)
        return self._tokenize(pieces, said)

    def _generated(self, turn: Turn) -> tuple[int, ...]:
        """Returns the ids of a turn that are exactly its text; none when a stop string, say, cut the text shorter."""
        token_ids = turn.token_ids
        while token_ids and token_ids[-1] in self._all_markup_ids:  # the template says itself where the turn ends
            token_ids = token_ids[:-1]
        is_plain = not any(token_id in self._all_markup_ids for token_id in token_ids)
        return token_ids if is_plain and self._plain.decode(list(token_ids)) == turn.text else ()

    def _segments(self, pieces: Sequence[str], said: Sequence[str | tuple[int, ...]]) -> Iterator[int | _PlainText]:
        """Yields ids and the plain text between them, from template parts (even places) and what was said (odd)."""
        run = _PlainText()
        for place, piece in enumerate(pieces):
            if place % 2:
                words = said[int(piece)]
                if isinstance(words, str):
                    run = run.plus(words, is_question=int(piece) == len(said) - 1)
                    continue
                yield run
                yield from words
                run = _PlainText()
                continue
            for part in self._markup.split(piece):
                if part not in self._markup_ids:
                    run = run.plus(part)
                    continue
                yield run
                yield self._markup_ids[part]
                run = _PlainText()
        yield run

    def _tokenize(self, pieces: Sequence[str], said: Sequence[str | tuple[int, ...]]) -> _Rendered:
        token_ids: list[int] = []
        question_rows = range(0)
        for segment in self._segments(pieces, said):
            if isinstance(segment, int):
                token_ids.append(segment)
                continue
            encoded = self._plain.encode(segment.text, add_special_tokens=False)
            words = segment.question
            rows = [
                row for row, (start, stop) in enumerate(encoded.offsets) if start < words.stop and stop > words.start
            ]
            if rows:
                question_rows = range(len(token_ids) + rows[0], len(token_ids) + rows[-1] + 1)
            token_ids.extend(encoded.ids)
        return _Rendered(token_ids, question_rows)


def _plain_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """Returns a private tokenizer that sees no markup: every added token counts as special, and those are off."""
    description = json.loads(tokenizer_json)
    for token in description["added_tokens"]:
        token["special"] = True
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
