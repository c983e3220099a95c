"""SamplingParams of a request -> Sampling, checked."""

from __future__ import annotations

import math

from engine.sampling import Sampling
from foveate.rpc.errors import FieldViolation
from foveate.v1 import sampling_pb2

MAX_TEMPERATURE = 10.0


def sampling_from_proto(message: sampling_pb2.SamplingParams) -> Sampling:
    """Returns the values of a message that has no violations."""
    top_p = message.top_p if message.HasField("top_p") else 1.0
    return Sampling(temperature=message.temperature, top_k=message.top_k, top_p=top_p, seed=message.seed)


def sampling_violations(message: sampling_pb2.SamplingParams, field: str) -> list[FieldViolation]:
    """Returns what is wrong with a message; `field` is its path in the request. A seed is required unless greedy."""
    violations = []
    if not (math.isfinite(message.temperature) and 0 <= message.temperature <= MAX_TEMPERATURE):
        violations.append(FieldViolation(f"{field}.temperature", f"must be in [0, {MAX_TEMPERATURE:g}]"))
    if message.HasField("top_p") and not 0 < message.top_p <= 1:
        violations.append(FieldViolation(f"{field}.top_p", "must be in (0, 1]"))
    if message.temperature > 0 and not message.HasField("seed"):
        violations.append(FieldViolation(f"{field}.seed", "must be set when temperature is above 0"))
    return violations
