"""What a request may say: every rule of the contract's comments, all violations of a request at once."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from foveate.rpc.channel import CHUNK_BYTES
from foveate.rpc.errors import FieldViolation, InvalidArgument, ResourceExhausted, invalid
from gateway.acceptance import AcceptanceFields, acceptance_of, acceptance_violations
from gateway.facts import ContextSpec, FrameSampling, Limits, MediaChunk
from gateway.values import (
    MAX_DRAFT_TOKENS,
    AcceptancePolicy,
    Drafting,
    DraftMode,
    Question,
    Role,
    Sampling,
    SelectionMethod,
    Turn,
)

MAX_QUESTION_BYTES = 32 * 1024
MAX_STOP_STRINGS = 8
MAX_STOP_LEN = 256
MAX_TEMPERATURE = 10.0
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0  # of presence and frequency, either way
MAX_BIAS = 100.0  # either way
MAX_BIASED = 1024
MAX_TOP_LOGPROBS = 20
MAX_ANSWERS = 8
MAX_FPS = 60.0
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100

_CONTEXT_NAME = re.compile(r"contexts/[A-Za-z0-9_-]{1,128}")
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_OF_PRUNED_VIDEOS = {SelectionMethod.DEFAULT, SelectionMethod.TWO_STAGE, SelectionMethod.UNIFORM}
_SEED_BITS = 63  # positive in every client language


@dataclass(frozen=True)
class TurnFields:
    """A turn as it came; `role` may be any number. Only turns that the server kept have `token_ids`."""

    role: int
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class AskFields:
    """A question as it came: unset is None, enumerations may be any number."""

    context: str
    question: str
    history: tuple[TurnFields, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False
    n: int | None = None
    draft_mode: int = 0
    num_draft_tokens: int | None = None
    visual_budget: float | None = None
    selection: int = 0
    conversation: str = ""
    keep_turns: int | None = None
    branch_of: str = ""
    acceptance: AcceptanceFields = field(default_factory=AcceptanceFields)


T = TypeVar("T")
Violations = Iterator[tuple[str, str]]


def parse_question(fields: AskFields, limits: Limits) -> Question:
    """Returns the question with its defaults filled in.

    Raises InvalidArgument with all violations, FailedPrecondition when a default needs a calibration the model lacks.
    """
    _raise_if_any(
        "the question cannot be asked",
        (
            *_context_violations("context", fields.context),
            *_text_violations(fields),
            *_history_violations(fields.history),
            *_length_violations(fields, limits),
            *_sampling_violations(fields),
            *_adjustment_violations(fields, limits),
            *_output_violations(fields),
            *_drafting_violations(fields),
            *acceptance_violations(fields.acceptance, limits.acceptance),
        ),
    )
    acceptance = acceptance_of(fields.acceptance, limits.acceptance)
    # What a loose policy keeps depends on the length of drafts: with one that follows the clock, no answer would come
    # out twice.
    is_adaptive = (
        fields.num_draft_tokens is None and limits.adapts_draft_length and acceptance.policy is AcceptancePolicy.EXACT
    )
    return Question(
        context=fields.context,
        text=fields.question,
        history=tuple(Turn(Role(turn.role), turn.text, turn.token_ids) for turn in fields.history),
        max_tokens=_max_tokens(fields, limits),
        stop=fields.stop,
        sampling=_sampling(fields),
        drafting=Drafting(
            mode=DraftMode(fields.draft_mode),
            num_draft_tokens=min(
                _or(fields.num_draft_tokens, limits.default_num_draft_tokens), limits.max_draft_tokens
            ),
            max_draft_tokens=limits.max_draft_tokens if is_adaptive else None,
            visual_budget=fields.visual_budget,
            selection=SelectionMethod(fields.selection),
        ),
        acceptance=acceptance,
        num_top_logprobs=fields.top_logprobs if fields.logprobs else None,
        ignore_eos=fields.ignore_eos,
        num_answers=_or(fields.n, 1),
    )


def check_context_name(field: str, name: str) -> str:
    """Returns `name` when it is of the form "contexts/{id}". Raises InvalidArgument."""
    _raise_if_any("malformed context name", tuple(_context_violations(field, name)))
    return name


def check_watch(target: str | None, request_id: str, name: str) -> tuple[str, str]:
    """Returns the request id or the name to watch, the other one empty. Raises InvalidArgument."""
    if target == "name":
        return "", check_context_name("name", name)
    if target is None or not REQUEST_ID.fullmatch(request_id):
        raise invalid("target", "must be a request_id or a name")
    return request_id, ""


def check_page_size(page_size: int) -> int:
    """Returns the page size to use. Raises InvalidArgument."""
    if page_size > MAX_PAGE_SIZE:
        _raise_if_any("the page is too large", (("page_size", f"must be at most {MAX_PAGE_SIZE}"),))
    return page_size or DEFAULT_PAGE_SIZE


class UploadCheck:
    """Checks the parts of a CreateContext stream as they pass: spec once and first, chunks in order, within limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._spec: ContextSpec | None = None
        self._num_bytes: int | None = None  # that are sent, counted from the start of the file; None before any

    def check(self, part: ContextSpec | MediaChunk | None) -> ContextSpec | MediaChunk:
        """Returns the part. Raises InvalidArgument, or ResourceExhausted for an upload over the limit."""
        if part is None:
            raise invalid("payload", "must be spec or chunk")
        if isinstance(part, MediaChunk):
            self._check_chunk(part)
        else:
            self._check_spec(part)
        return part

    def check_end(self) -> None:
        """Raises InvalidArgument when the stream ended before it said what to prefill."""
        if self._spec is None:
            raise invalid("spec", "must be sent first")

    def _check_spec(self, spec: ContextSpec) -> None:
        if self._spec is not None:
            raise invalid("spec", "must be sent once")
        self._spec = spec
        violations = list(_frame_violations(spec.sampling, self._limits))
        if spec.path == "":
            violations.append(("spec.source", "must be an upload, a path or a URL"))
        if spec.request_id and not REQUEST_ID.fullmatch(spec.request_id):
            violations.append(("spec.request_id", 'must be 1 to 128 of A-Z, a-z, 0-9, "-", "_"'))
        if spec.sha256 and not _SHA256.fullmatch(spec.sha256):
            violations.append(("spec.upload.sha256", "must be 64 hexadecimal digits"))
        _raise_if_any("the video cannot be prefilled", tuple(violations))
        self._check_size(spec.total_bytes)

    def _check_chunk(self, chunk: MediaChunk) -> None:
        if self._spec is None:
            raise invalid("spec", "must be sent first")
        if self._spec.path is not None or self._spec.url:
            raise invalid("chunk", "must only follow an upload")
        # Where a request goes on that was sent before, only the verifier that has its beginning knows.
        goes_on = self._num_bytes is None and self._spec.request_id
        if chunk.write_offset != (self._num_bytes or 0) and not goes_on:
            raise invalid("chunk.write_offset", f"must be {self._num_bytes or 0}, the number of bytes sent before")
        if len(chunk.data) > CHUNK_BYTES:
            raise invalid("chunk.data", f"must be at most {CHUNK_BYTES} bytes")
        self._num_bytes = chunk.write_offset + len(chunk.data)
        self._check_size(self._num_bytes)

    def _check_size(self, num_bytes: int) -> None:
        limit = self._limits.max_upload_bytes
        if limit and num_bytes > limit:
            raise ResourceExhausted(
                f"the upload of {num_bytes} bytes is over the limit of {limit} bytes",
                reason="UPLOAD_TOO_LARGE",
                metadata={"num_bytes": str(num_bytes), "max_upload_bytes": str(limit)},
            )


def _context_violations(field: str, name: str) -> Violations:
    if not _CONTEXT_NAME.fullmatch(name):
        yield field, 'must be of the form "contexts/{id}"'


def _text_violations(fields: AskFields) -> Violations:
    if not fields.question.strip():
        yield "question", "must not be empty"
    elif len(fields.question.encode()) > MAX_QUESTION_BYTES:
        yield "question", f"must be at most {MAX_QUESTION_BYTES} bytes"
    if len(fields.stop) > MAX_STOP_STRINGS:
        yield "stop", f"must be at most {MAX_STOP_STRINGS} strings"
    for index, stop in enumerate(fields.stop):
        if not 1 <= len(stop) <= MAX_STOP_LEN:
            yield f"stop[{index}]", f"must have 1 to {MAX_STOP_LEN} characters"


def _history_violations(history: tuple[TurnFields, ...]) -> Violations:
    for index, turn in enumerate(history):
        expected = Role.USER if index % 2 == 0 else Role.ASSISTANT
        if turn.role != expected:
            yield f"history[{index}].role", f"must be {expected.name}: turns alternate and start with the user"
    if len(history) % 2:
        yield "history", "must end with a turn of the model"


def _length_violations(fields: AskFields, limits: Limits) -> Violations:
    if fields.max_tokens is not None and not 1 <= fields.max_tokens <= limits.max_tokens_ceiling:
        yield "max_tokens", f"must be 1 to {limits.max_tokens_ceiling}"


def _sampling_violations(fields: AskFields) -> Violations:
    # Comparisons are written so that NaN fails them.
    if fields.temperature is not None and not 0 <= fields.temperature <= MAX_TEMPERATURE:
        yield "sampling.temperature", f"must be 0 to {MAX_TEMPERATURE:g}"
    if fields.top_p is not None and not 0 < fields.top_p <= 1:
        yield "sampling.top_p", "must be above 0 and at most 1"


def _adjustment_violations(fields: AskFields, limits: Limits) -> Violations:
    # Comparisons are written so that NaN fails them.
    repetition = fields.repetition_penalty
    if repetition is not None and not 0 < repetition <= MAX_REPETITION_PENALTY:
        yield "sampling.repetition_penalty", f"must be above 0 and at most {MAX_REPETITION_PENALTY:g}"
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(fields, name)
        if penalty is not None and not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            yield f"sampling.{name}", f"must be {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
    if len(fields.logit_bias) > MAX_BIASED:
        yield "sampling.logit_bias", f"must be at most {MAX_BIASED} tokens"
    for token_id, bias in fields.logit_bias[:MAX_BIASED]:
        if token_id >= limits.vocab_size:
            yield f"sampling.logit_bias[{token_id}]", f"is no token: the vocabulary has {limits.vocab_size}"
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            yield f"sampling.logit_bias[{token_id}]", f"must be {-MAX_BIAS:g} to {MAX_BIAS:g}"
    if fields.min_tokens is not None and fields.min_tokens > _max_tokens(fields, limits):
        yield "sampling.min_tokens", f"must be at most {_max_tokens(fields, limits)}, the answer's max_tokens"


def _output_violations(fields: AskFields) -> Violations:
    if fields.top_logprobs > MAX_TOP_LOGPROBS:
        yield "top_logprobs", f"must be at most {MAX_TOP_LOGPROBS}"
    if fields.top_logprobs and not fields.logprobs:
        yield "top_logprobs", "needs logprobs"
    if fields.n is None or fields.n == 1:
        return
    if not 1 <= fields.n <= MAX_ANSWERS:
        yield "n", f"must be 1 to {MAX_ANSWERS}"
    elif not fields.temperature:
        yield "n", "must be 1 with temperature 0: all answers would be equal"
    if fields.conversation:
        yield "n", "must be 1 within a conversation, which goes on from one answer"


def _drafting_violations(fields: AskFields) -> Violations:
    if fields.draft_mode not in set(DraftMode):
        yield "drafting.mode", "is not a known mode"
    if fields.selection not in set(SelectionMethod):
        yield "drafting.selection", "is not a known method"
    elif fields.draft_mode == DraftMode.SMALL and fields.selection not in _OF_PRUNED_VIDEOS:
        yield "drafting.selection", "a small model's video is pruned by TWO_STAGE or UNIFORM"
    if fields.num_draft_tokens is not None and not 1 <= fields.num_draft_tokens <= MAX_DRAFT_TOKENS:
        yield "drafting.num_draft_tokens", f"must be 1 to {MAX_DRAFT_TOKENS}"
    if fields.visual_budget is not None and not 0 <= fields.visual_budget <= 1:
        yield "drafting.visual_budget", "must be 0 to 1"


def _frame_violations(sampling: FrameSampling, limits: Limits) -> Violations:
    if sampling.fps is not None and not 0 < sampling.fps <= MAX_FPS:
        yield "spec.sampling.fps", f"must be above 0 and at most {MAX_FPS:g}"
    if sampling.max_frames is not None and not 1 <= sampling.max_frames <= (limits.max_frames or math.inf):
        yield "spec.sampling.max_frames", f"must be 1 to {limits.max_frames}"


def _sampling(fields: AskFields) -> Sampling:
    temperature = _or(fields.temperature, 0.0)
    seed = None
    if temperature > 0:
        seed = fields.seed if fields.seed is not None else secrets.randbits(_SEED_BITS)
    return Sampling(
        temperature,
        _or(fields.top_k, 0),
        _or(fields.top_p, 1.0),
        seed,
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        logit_bias=fields.logit_bias,
        min_tokens=_or(fields.min_tokens, 0),
    )


def _max_tokens(fields: AskFields, limits: Limits) -> int:
    return _or(fields.max_tokens, min(limits.default_max_tokens, limits.max_tokens_ceiling))


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _raise_if_any(message: str, violations: tuple[tuple[str, str], ...]) -> None:
    if violations:
        raise InvalidArgument(message, violations=tuple(FieldViolation(*violation) for violation in violations))
