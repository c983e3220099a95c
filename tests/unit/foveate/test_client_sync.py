"""The sync client against a scripted gateway over real gRPC."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from foveate.client import (
    Client,
    ContextState,
    DraftMode,
    FinishReason,
    Guarantee,
    Origin,
    Progress,
    Role,
    Selection,
    Stage,
    Turn,
)
from foveate.rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from foveate.v1 import answers_pb2, contexts_pb2
from tests.unit.foveate.scripted_gateway import ScriptedGateway


def test_three_lines_ask(gateway: ScriptedGateway, video: Path) -> None:
    with Client(gateway.address) as client:
        context = client.create_context(video)
        answer = client.ask(context, "What happens?")
    assert answer.text == "The red ball rolls."
    assert answer.token_ids == (1, 2, 3, 4, 5)
    assert answer.finish_reason is FinishReason.EOS
    assert answer.guarantee is Guarantee.LOSSLESS
    assert (answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_output_tokens) == (40, 30, 5)
    assert answer.stats.accepted_per_round == pytest.approx(1.5)
    assert answer.tokens_per_s == pytest.approx(40.0)
    assert answer.stats.draft_mode is DraftMode.SPARSE
    assert answer.seed is None
    assert answer.turns == (Turn(Role.USER, "What happens?"), Turn(Role.ASSISTANT, answer.text))


def test_stream_gives_deltas_then_result(gateway: ScriptedGateway) -> None:
    with Client(gateway.address) as client, client.stream("contexts/a", "q", explain=True) as stream:
        deltas = list(stream)
        assert [delta.text for delta in deltas] == ["The ", "red ball ", "rolls."]
        assert deltas[1].origins == (Origin.ACCEPTED, Origin.RECOVERED)
        assert stream.result.text == "".join(delta.text for delta in deltas)
        assert len(stream.result.origins) == len(stream.result.token_texts) == 5
        with pytest.raises(StopIteration):
            next(stream)


def test_n_answers_are_told_apart(gateway: ScriptedGateway) -> None:
    with Client(gateway.address) as client:
        answers = client.ask_n("contexts/a", "q", n=3, temperature=0.5, seed=4, logprobs=True)
        deltas = list(client.stream("contexts/a", "q", n=2, temperature=0.5))
    assert [answer.text for answer in answers] == ["The red ball rolls."] * 3
    assert [answer.seed for answer in answers] == [4, 5, 6]
    assert [len(answer.logprobs) for answer in answers] == [5, 5, 5]
    assert gateway.answers.requests[0].n == 3
    for index in range(2):
        assert "".join(delta.text for delta in deltas if delta.index == index) == "The red ball rolls."


def test_result_reads_the_rest(gateway: ScriptedGateway) -> None:
    with Client(gateway.address) as client:
        stream = client.stream("contexts/a", "q")
        next(stream)
        assert stream.result.text == "The red ball rolls."


def test_upload_is_whole_in_order_and_reports_progress(gateway: ScriptedGateway, video: Path) -> None:
    seen: list[tuple[Progress, threading.Thread]] = []
    with Client(gateway.address) as client:
        context = client.create_context(
            video, fps=4.0, max_frames=8, on_progress=lambda one: seen.append((one, threading.current_thread()))
        )
        again = client.create_context_from_bytes(video.read_bytes(), filename="x.mp4")
    num_bytes = video.stat().st_size
    spec = gateway.contexts.specs[0]
    assert (spec.upload.filename, spec.upload.total_bytes) == ("clip.mp4", num_bytes)
    assert (spec.sampling.fps, spec.sampling.max_frames) == (4.0, 8)
    assert not gateway.contexts.specs[1].sampling.HasField("fps")
    uploads = [one.done for one, _ in seen if one.stage is Stage.UPLOAD]
    assert uploads == [2**20, 2 * 2**20, num_bytes]
    assert [one.stage for one, _ in seen][-3:] == [Stage.DECODE, Stage.ENCODE, Stage.PREFILL]
    assert {thread for _, thread in seen} == {threading.main_thread()}
    assert again.name == context.name
    assert (context.reused, again.reused) == (False, True)
    assert context.create_time.timestamp() == 1_700_000_000


def test_contexts_are_listed_over_pages_shown_and_deleted(gateway: ScriptedGateway) -> None:
    with Client(gateway.address) as client:
        made = [client.create_context(server_path=f"{i}.mp4") for i in range(5)]
        listed = client.list_contexts()
        assert {context.name for context in listed} == {context.name for context in made}
        assert client.get_context(made[0].name.removeprefix("contexts/")).name == made[0].name
        client.delete_context(made[0])
        with pytest.raises(NotFound) as caught:
            client.get_context(made[0])
        assert caught.value.resource == ("context", made[0].name)
        assert len(client.list_contexts()) == 4
        gateway.contexts.held[made[1].name].state = contexts_pb2.CONTEXT_STATE_COLD
        gateway.contexts.held[made[2].name].media_sha256 = "ab" * 32
        assert [context.name for context in client.list_contexts(state=ContextState.COLD)] == [made[1].name]
        assert [context.name for context in client.list_contexts(media_sha256="ab" * 32)] == [made[2].name]
        assert client.list_contexts(state=ContextState.COLD, media_sha256="ab" * 32) == []


def test_every_option_is_sent(gateway: ScriptedGateway) -> None:
    history = [Turn(Role.USER, "before"), Turn(Role.ASSISTANT, "yes")]
    with Client(gateway.address) as client:
        answer = client.ask(
            "contexts/a",
            "q",
            history=history,
            max_tokens=7,
            stop=["a", "b"],
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            seed=2**63,
            draft=DraftMode.NGRAM,
            num_draft_tokens=4,
            visual_budget=0.5,
            selection=Selection.RECENT,
            explain=True,
            timeout_s=5.0,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias={7: 2.5, 9: -100.0},
            min_tokens=2,
            logprobs=True,
            top_logprobs=3,
            ignore_eos=True,
        )
        client.ask("contexts/a", "q")
    sent, bare = gateway.answers.requests
    assert [(turn.role, turn.text) for turn in sent.history] == [(1, "before"), (2, "yes")]
    assert (sent.max_tokens, list(sent.stop), sent.explain) == (7, ["a", "b"], True)
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.top_p) == (0.5, 3, 0.25)
    assert sent.sampling.seed == 2**63 == answer.seed
    assert sent.drafting.mode == answers_pb2.DRAFT_MODE_NGRAM
    assert (sent.drafting.num_draft_tokens, sent.drafting.visual_budget) == (4, 0.5)
    assert sent.drafting.selection == answers_pb2.SELECTION_METHOD_RECENT
    assert (sent.sampling.repetition_penalty, sent.sampling.presence_penalty) == (1.5, -0.5)
    assert (sent.sampling.frequency_penalty, sent.sampling.min_tokens) == (0.25, 2)
    assert dict(sent.sampling.logit_bias) == {7: 2.5, 9: -100.0}
    assert (sent.logprobs, sent.top_logprobs, sent.ignore_eos, sent.n) == (True, 3, True, 0)
    assert (bare.logprobs, bare.top_logprobs, bare.ignore_eos, dict(bare.sampling.logit_bias)) == (False, 0, False, {})
    assert [one.logprob for one in answer.logprobs] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert [[(top.token_id, top.text, top.logprob) for top in one.top] for one in answer.logprobs] == [
        [(rank, str(rank), -1.0 - rank) for rank in range(3)]
    ] * 5
    for message, unset in (
        (bare, "max_tokens"),
        (bare, "n"),
        (bare.sampling, "min_tokens"),
        (bare.sampling, "repetition_penalty"),
        (bare.sampling, "temperature"),
        (bare.sampling, "seed"),
        (bare.drafting, "visual_budget"),
    ):
        assert not message.HasField(unset)


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("max_tokens", 2**31, "max_tokens"),
        ("top_k", -1, "sampling.top_k"),
        ("seed", -1, "sampling.seed"),
        ("seed", 2**64, "sampling.seed"),
        ("num_draft_tokens", -3, "drafting.num_draft_tokens"),
        ("min_tokens", -1, "sampling.min_tokens"),
        ("top_logprobs", 2**32, "top_logprobs"),
        ("logit_bias", {-1: 1.0}, "sampling.logit_bias[-1]"),
        ("n", -1, "n"),
        ("n", 2, "n"),  # ask returns one
    ],
)
def test_numbers_the_wire_cannot_carry_are_field_violations(option: str, value: int, field: str) -> None:
    options: Any = {option: value}
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgument) as caught:
        client.ask("contexts/a", "q", **options)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_an_unknown_option_is_a_type_error() -> None:
    options: Any = {"temprature": 1.0}
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match="temprature"):
        client.ask("contexts/a", "q", **options)


def test_server_errors_keep_their_details(gateway: ScriptedGateway, video: Path) -> None:
    with Client(gateway.address) as client:
        with pytest.raises(InvalidArgument) as refused:
            client.ask("contexts/a", " ")
        assert refused.value.violations[0].field == "question"
        with pytest.raises(ResourceExhausted) as full:
            client.ask("contexts/a", "full")
        assert full.value.retry_after_s == 0.5
        gateway.contexts.max_upload_bytes = 10
        with pytest.raises(ResourceExhausted, match="limit 10"):
            client.create_context(video)
        with pytest.raises(NotFound):
            client.create_context(server_path="missing.mp4")
        assert client.ask("contexts/a", "q").text


def test_local_mistakes_are_told_before_any_call(tmp_path: Path) -> None:
    empty = tmp_path / "empty.mp4"
    empty.touch()
    with Client("127.0.0.1:1") as client:
        with pytest.raises(NotFound, match="no file at"):
            client.create_context(tmp_path / "none.mp4")
        with pytest.raises(InvalidArgument, match="is empty"):
            client.create_context(empty)
        with pytest.raises(InvalidArgument, match="is a folder"):
            client.create_context(tmp_path)
        with pytest.raises(InvalidArgument, match="no bytes"):
            client.create_context_from_bytes(b"")
        with pytest.raises(InvalidArgument, match="either a local path or server_path"):
            client.create_context()
        with pytest.raises(InvalidArgument, match="max_frames"):
            client.create_context(server_path="a.mp4", max_frames=-1)


def test_an_unreachable_server_is_named() -> None:
    with socket.socket() as taken:  # bound, not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Client(address) as client:
            with pytest.raises(Unavailable, match=f"no server answers at {address}") as caught:
                client.ask("contexts/a", "q")
            assert caught.value.reason == "UNREACHABLE"
            assert not client.is_serving()


def test_deadlines_hold(gateway: ScriptedGateway) -> None:
    with Client(gateway.address, timeout_s=0.3) as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.ask("contexts/a", "slow")
        with pytest.raises(DeadlineExceeded):
            client.create_context_from_bytes(b"slow", timeout_s=0.2)
        assert time.monotonic() - started < 3


def test_leaving_a_stream_cancels_it(gateway: ScriptedGateway) -> None:
    with Client(gateway.address) as client:
        with client.stream("contexts/a", "slow") as stream:
            assert next(stream).text == "The "
        assert gateway.answers.cancelled.wait(2)
        with pytest.raises(Cancelled):
            next(iter(stream))


def test_a_forgotten_stream_is_cancelled(gateway: ScriptedGateway) -> None:
    with Client(gateway.address) as client:
        for delta in client.stream("contexts/a", "slow"):
            assert delta.text
            break
        gc.collect()
        assert gateway.answers.cancelled.wait(2)


def test_a_stream_without_statistics_is_an_error(gateway: ScriptedGateway) -> None:
    with Client(gateway.address) as client, pytest.raises(Internal, match="without its statistics"):
        client.ask("contexts/a", "cut")


async def test_the_sync_client_works_inside_a_running_loop(gateway: ScriptedGateway) -> None:
    assert asyncio.get_running_loop().is_running()
    with Client(gateway.address) as client:
        assert client.ask("contexts/a", "q").text == "The red ball rolls."


_FORKING = """
import os, sys
from foveate.client import Client
client = Client(sys.argv[1])
child = os.fork()
if child == 0:
    print(client.ask("contexts/a", "q").text, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(client.ask("contexts/a", "q").text, flush=True)
"""


def test_a_client_made_before_a_fork_works_on_both_sides(gateway: ScriptedGateway) -> None:
    command = [sys.executable, "-c", _FORKING, gateway.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == ["The red ball rolls."] * 2


def test_a_closed_client_opens_again(gateway: ScriptedGateway) -> None:
    client = Client(gateway.address)
    assert client.is_serving()
    client.close()
    client.close()
    assert client.server_info().model == "tiny"
    client.close()


def test_threads_share_a_client(gateway: ScriptedGateway) -> None:
    texts: list[str] = []
    with Client(gateway.address) as client:
        threads = [threading.Thread(target=lambda: texts.append(client.ask("contexts/a", "q").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == ["The red ball rolls."] * 8


def test_the_client_never_imports_the_engine() -> None:
    code = "import sys, foveate.client, foveate.cli.main, foveate.stack\n"
    code += "print({'torch', 'transformers', 'numpy', 'av', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
