"""transformers' `generate` from a cache with the verifier's own prefilled keys and values: decoding alone.

The cache is copied out of the shared pool, as a drafter reads it, so both sides start from the same bits and a long
video is prefilled once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import grpc
import torch
from transformers import DynamicCache, LogitsProcessor

from engine.handle_proto import handle_from_proto
from engine.kv_handle import Slab
from engine.kv_share import MappedPool
from foveate.client import Answer, Context
from foveate.rpc.channel import CHANNEL_OPTIONS
from foveate.v1 import verifier_pb2, verifier_pb2_grpc

NEAR_TIE_MARGIN = 1e-4


def decode_with_transformers(
    verifier: str,
    reference: torch.nn.Module,
    context: Context,
    questions: Sequence[str],
    ours: Sequence[Answer],
    max_tokens: int,
) -> tuple[float, bool]:
    """Returns milliseconds per token of `generate`, and whether its tokens are ours, near-ties aside.

    `verifier` is the address of the verifier that holds the context; `ours` are our answers to the questions, in order.
    """
    total_ms, num_tokens, agrees = 0.0, 0, True
    for index, question in enumerate(questions):
        opened, cache = _prefilled_cache(verifier, context, question)
        clock = _Clock()
        token_ids = _generate(reference, opened, cache, clock, max_tokens)
        total_ms += clock.decode_ms
        num_tokens += len(clock.times_s) - 1
        agrees = agrees and _agree(list(ours[index].token_ids), token_ids, clock)
    return total_ms / max(1, num_tokens), agrees


def _agree(ours: list[int], theirs: list[int], clock: _Clock) -> bool:
    """The first token was chosen by the verifier; token i + 1 comes from the clock's i-th logits."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            best, second = clock.scores[place - 1][0].topk(2).values.tolist()
            return bool(best - second < NEAR_TIE_MARGIN)
    return True


def _prefilled_cache(
    verifier: str, context: Context, question: str
) -> tuple[verifier_pb2.SequenceOpened, DynamicCache]:
    """Opens a sequence as a gateway would, and copies its keys and values out of the shared pool as a drafter would."""
    opening = verifier_pb2.OpenSequence(context=context.name, question=question, max_tokens=1)
    with grpc.insecure_channel(verifier, options=CHANNEL_OPTIONS) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        requests = _HeldOpen(verifier_pb2.VerifyRequest(request_id=1, open=opening))
        call = stub.Verify(iter(requests))
        opened = next(call).opened
        pool = MappedPool.attach(handle_from_proto(opened.kv_handle), device=torch.device("cpu"))
        num_context, num_prompt = opened.num_context_tokens, opened.num_prompt_tokens
        cache = DynamicCache()
        context_rows = pool.views(Slab(opened.context.offset_bytes, opened.context.capacity))
        thread_rows = pool.views(Slab(opened.thread.offset_bytes, opened.thread.capacity))
        for layer in range(opened.kv_handle.num_layers):
            keys, values = (
                torch.cat([whole[layer, :, :num_context], new[layer, :, : num_prompt - num_context]], dim=1)[None]
                for whole, new in zip(context_rows, thread_rows, strict=True)
            )
            cache.update(keys, values, layer)
        requests.close()
        call.cancel()
    return opened, cache


class _HeldOpen:
    """A request stream that stays open after its one message until it is closed."""

    def __init__(self, message: verifier_pb2.VerifyRequest) -> None:
        self._message, self._closed = message, threading.Event()

    def __iter__(self) -> Iterator[verifier_pb2.VerifyRequest]:
        yield self._message
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()


class _Clock(LogitsProcessor):
    """Notes when each token's logits are there, and keeps them."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        self.scores.append(scores)
        return scores

    @property
    def decode_ms(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) * 1000


@torch.inference_mode()
def _generate(
    model: torch.nn.Module,
    opened: verifier_pb2.SequenceOpened,
    cache: DynamicCache,
    clock: _Clock,
    max_tokens: int,
) -> list[int]:
    # Only the last id is run; those before it stand in the cache, and their ids are never looked at.
    num_prompt = opened.num_prompt_tokens
    input_ids = torch.zeros(1, num_prompt + 1, dtype=torch.int64)
    input_ids[0, -1] = opened.first_token_id
    positions = (torch.arange(num_prompt + 1) + opened.position_delta).expand(3, 1, -1)
    output = model.generate(  # type: ignore[operator]
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        mm_token_type_ids=torch.zeros_like(input_ids),
        position_ids=positions,
        cache=cache,
        max_new_tokens=max_tokens - 1,
        do_sample=False,
        logits_processor=[clock],
    )
    return [int(token_id) for token_id in output[0, num_prompt:]]
