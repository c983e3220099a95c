"""SamplingParams of a request -> Sampling, checked."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.adjusting import Adjustments
from engine.sampling import Sampling
from foveate.rpc.errors import FieldViolation
from foveate.v1 import sampling_pb2

MAX_TEMPERATURE = 10.0
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0  # of presence and frequency, either way
MAX_BIAS = 100.0  # either way
MAX_BIASED = 1024


def sampling_from_proto(message: sampling_pb2.SamplingParams) -> Sampling:
    """Returns the values of a message that has no violations."""
    top_p = message.top_p if message.HasField("top_p") else 1.0
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=top_p,
        seed=message.seed,
        adjustments=_adjustments(message),
    )


def _adjustments(message: sampling_pb2.SamplingParams) -> Adjustments | None:
    asked = Adjustments(
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        min_tokens=message.min_tokens,
    )
    return None if asked == Adjustments() else asked


def sampling_violations(
    message: sampling_pb2.SamplingParams, field: str, *, vocab_size: int | None = None
) -> list[FieldViolation]:
    """Returns what is wrong with a message; `field` is its path in the request. A seed is required unless greedy.

    Ids of biased tokens must be below `vocab_size`.
    """
    violations = list(_adjustment_violations(message, field, vocab_size))
    if not (math.isfinite(message.temperature) and 0 <= message.temperature <= MAX_TEMPERATURE):
        violations.append(FieldViolation(f"{field}.temperature", f"must be in [0, {MAX_TEMPERATURE:g}]"))
    if message.HasField("top_p") and not 0 < message.top_p <= 1:
        violations.append(FieldViolation(f"{field}.top_p", "must be in (0, 1]"))
    if message.temperature > 0 and not message.HasField("seed"):
        violations.append(FieldViolation(f"{field}.seed", "must be set when temperature is above 0"))
    return violations


def _adjustment_violations(
    message: sampling_pb2.SamplingParams, field: str, vocab_size: int | None
) -> Iterator[FieldViolation]:
    # Comparisons are written so that NaN fails them.
    if message.HasField("repetition_penalty") and not 0 < message.repetition_penalty <= MAX_REPETITION_PENALTY:
        yield FieldViolation(f"{field}.repetition_penalty", f"must be in (0, {MAX_REPETITION_PENALTY:g}]")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= getattr(message, name) <= MAX_PENALTY:
            yield FieldViolation(f"{field}.{name}", f"must be in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}]")
    if len(message.logit_bias) > MAX_BIASED:
        yield FieldViolation(f"{field}.logit_bias", f"must be at most {MAX_BIASED} tokens")
        return
    for token_id, bias in sorted(message.logit_bias.items()):
        if vocab_size is not None and token_id >= vocab_size:
            yield FieldViolation(f"{field}.logit_bias[{token_id}]", f"ids must be below {vocab_size}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            yield FieldViolation(f"{field}.logit_bias[{token_id}]", f"must be in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")
