"""The algorithm of an answer. Read this first.

    open sequence        the verifier prefills the question on the video's KV and chooses the first token
    open drafter         it attaches to that KV and gathers its sparse view
    round by round       draft -> verify -> decide -> commit -> stop or stream

A round starts from a *head*: `base_len` rows of KV that stay, and the token committed after them, which has none yet.
The drafter proposes *draft tokens*. The verifier reads head and draft in one pass and answers with its own choice at
every place, one more than there are draft tokens. The policy compares. Under the exact policy:

    draft token     accepted token    the verifier would have chosen it too, and all before it
    verifier token  recovered token   the verifier's choice in place of the first draft token that is rejected
                    bonus token       its choice after a draft that is accepted whole
                    plain token       its choice in a round without a draft

A round commits its accepted tokens and one verifier token. T is the mean number of accepted tokens per round, without
the verifier token; the mean acceptance length is T + 1. Taking rejected tokens back costs nothing: the next head's
`base_len` stops before their rows. So the answer is that of plain decoding whatever the drafter says; the drafter only
decides in how many rounds. A loose policy also keeps draft tokens that the verifier would not have chosen; then the
answer says so.

Every stage takes and returns values. The KV stays in the verifier; EOS, length and stop strings stay in `stops`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer
from gateway.drafters import DraftPlan
from gateway.exchange import Deadline
from gateway.policies import Decision, Memory, Policy, guarantee_of
from gateway.served import Served
from gateway.statistics import Statistics
from gateway.stops import Output
from gateway.values import Event, Finished, Head, OpenedSequence, Origin, Question, Started, Token


@dataclass(frozen=True)
class Stages:
    """Who does what in an answer."""

    served: Served  # the verifier, and the tokenizer of its model
    drafts: DraftPlan
    policy: Policy
    deadline: Deadline


LOSSY_NOTE = "the context's keys and values came back from the cold tier in eight bits"


async def answer(question: Question, stages: Stages, stats: Statistics) -> AsyncGenerator[Event]:
    """Yields the events of an answer. Closing the iterator, at any point, closes both streams at once.

    Raises what the verifier raises: NotFound, ResourceExhausted, Unavailable, DeadlineExceeded.
    """
    async with stages.served.opener.open_sequence(question, stages.deadline) as sequence:
        opened = sequence.opened
        stats.first_token(opened.prefill_us)
        yield Started(opened.num_prompt_tokens, opened.num_context_tokens + opened.num_reused_tokens, opened.fetch)

        output = _output(question, opened, stages.served)
        yield output.commit([Token(opened.first_token_id, Origin.PLAIN, opened.first_place)])

        async with stages.drafts.open(question, opened) as drafter:
            draft_length = stages.drafts.draft_length()
            head, memory = _first_head(opened), Memory()
            stats.begin_rounds()
            while output.finish_reason is None:
                draft = await drafter.draft(head, draft_length.next(output.remaining))
                verified = await sequence.verify(head, draft)
                decision = stages.policy.decide(draft, verified, memory)

                num_before = output.num_committed
                delta = output.commit(decision.tokens)
                stats.add_round(draft, verified, decision, output.num_committed - num_before)
                draft_length.learn(draft, verified, decision.num_accepted)
                head, memory = _next_head(head, decision), decision.memory
                if delta.tokens:
                    yield delta

            counted = stats.finish(drafter.mode)
            is_lossy = sequence.opened.is_context_lossy  # as it is now: another verifier may have gone on
            yield Finished(
                finish_reason=output.finish_reason,
                guarantee=guarantee_of(counted.num_loose_tokens, is_context_lossy=is_lossy),
                num_prompt_tokens=opened.num_prompt_tokens,
                num_output_tokens=output.num_sent,
                stats=counted,
                seed=question.sampling.seed,
                notes=(*drafter.notes, LOSSY_NOTE) if is_lossy else drafter.notes,
                policy=stages.policy.kind,
                loose_positions=tuple(output.loose_positions),
            )


def _output(question: Question, opened: OpenedSequence, served: Served) -> Output:
    """The first token is free: it was chosen when the prompt was prefilled, even if the prompt took all the room."""
    return Output(
        Detokenizer(served.tokenizer),
        eos_token_ids=frozenset() if question.ignore_eos else served.info.eos_token_ids,
        max_tokens=max(1, min(question.max_tokens, served.room_for_answer(opened))),
        stop=question.stop,
        min_tokens=question.sampling.min_tokens,
    )


def _first_head(opened: OpenedSequence) -> Head:
    first = (opened.first_token_id,)
    return Head(round=1, base_len=opened.num_prompt_tokens, token_ids=first, committed_ids=first)


def _next_head(head: Head, decision: Decision) -> Head:
    """The rows of the old head's tokens and of the accepted tokens stay; the verifier token comes next."""
    committed_ids = tuple(token.id for token in decision.tokens)
    base_len = head.base_len + len(head.token_ids) + decision.num_accepted
    return Head(head.round + 1, base_len, committed_ids[decision.num_accepted :], committed_ids)
