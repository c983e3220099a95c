"""The command line against a scripted gateway: streams, JSON, exit codes, no traceback, no colours in pipes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import foveate
from foveate.cli.main import app
from foveate.v1 import answers_pb2
from tests.unit.foveate.scripted_gateway import ScriptedGateway

ANSWER = "The red ball rolls."


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOVEATE_SERVER", "FOVEATE_MODEL", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: Any, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments], input=stdin)


def test_ask_streams_the_answer_to_stdout_and_the_rest_to_stderr(gateway: ScriptedGateway, video: Path) -> None:
    done = run("ask", video, "What happens?", "--server", gateway.address)
    assert done.exit_code == 0
    assert done.stdout == ANSWER + "\n"
    for part in ("5 tokens", "40.0 tokens/s", "2 rounds", "1.50 accepted per round", "first token 12 ms", "lossless"):
        assert part in done.stderr
    assert "36 visual tokens" in done.stderr
    assert "\x1b" not in done.output


def test_ask_json_is_one_object_and_nothing_else(gateway: ScriptedGateway, video: Path) -> None:
    done = run("ask", video, "note", "--server", gateway.address, "--json", "--explain")
    assert done.exit_code == 0
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert told["text"] == ANSWER
    assert told["token_ids"] == [1, 2, 3, 4, 5]
    assert told["origins"] == ["plain", "accepted", "recovered", "accepted", "bonus"]
    assert told["stats"]["num_accepted_tokens"] == 3
    assert told["accepted_per_round"] == 1.5
    assert told["context"]["name"].startswith("contexts/")
    assert told["notes"] == ["the drafter was lost"]


def test_ask_passes_every_option(gateway: ScriptedGateway, video: Path) -> None:
    options = "--max-tokens 9 --temperature .5 --top-k 4 --top-p .25 --seed 7 --stop a --stop b --fps 4 --max-frames 3"
    options += " --draft ngram --num-draft-tokens 2 --budget .5 --deadline 20"
    done = run("ask", video, "q", "--server", gateway.address, *options.split())
    assert done.exit_code == 0
    assert "seed 7" in done.stderr
    sent, spec = gateway.answers.requests[0], gateway.contexts.specs[0]
    assert (sent.max_tokens, list(sent.stop), sent.sampling.seed) == (9, ["a", "b"], 7)
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.top_p) == (0.5, 4, 0.25)
    assert (sent.drafting.mode, sent.drafting.num_draft_tokens) == (answers_pb2.DRAFT_MODE_NGRAM, 2)
    assert sent.drafting.visual_budget == 0.5
    assert (spec.sampling.fps, spec.sampling.max_frames) == (4.0, 3)


def test_ask_passes_the_output_options(gateway: ScriptedGateway, video: Path) -> None:
    options = "--min-tokens 2 --repetition-penalty 1.5 --presence-penalty .5 --frequency-penalty -.25 --ignore-eos"
    options += " --logit-bias 7=2.5 --logit-bias 9=-100 --logprobs 2"
    done = run("ask", video, "q", "--server", gateway.address, *options.split())
    assert done.exit_code == 0
    sent = gateway.answers.requests[0]
    assert (sent.sampling.min_tokens, sent.sampling.repetition_penalty, sent.ignore_eos) == (2, 1.5, True)
    assert (sent.sampling.presence_penalty, sent.sampling.frequency_penalty) == (0.5, -0.25)
    assert (dict(sent.sampling.logit_bias), sent.logprobs, sent.top_logprobs) == ({7: 2.5, 9: -100.0}, True, 2)
    assert [line.split() for line in done.stderr.splitlines() if line.startswith("      3")] == [
        ["3", "-3.000", "'0'", "-1.000", "'1'", "-2.000"]
    ]
    wrong = run("ask", video, "q", "--server", gateway.address, "--logit-bias", "seven=1")
    assert wrong.exit_code == 2
    assert "ID=BIAS" in wrong.stderr


def test_several_answers_are_numbered(gateway: ScriptedGateway, video: Path) -> None:
    asked = ("ask", video, "q", "--server", gateway.address, "--n", "2", "--temperature", ".5", "--seed", "3")
    assert run(*asked).stdout == f"[1] {ANSWER}\n[2] {ANSWER}\n"
    told = json.loads(run(*asked, "--json").stdout)
    assert [(answer["text"], answer["seed"]) for answer in told["answers"]] == [(ANSWER, 3), (ANSWER, 4)]


def test_explain_without_a_terminal_has_no_colours_but_a_legend(gateway: ScriptedGateway, video: Path) -> None:
    done = run("ask", video, "q", "--server", gateway.address, "--explain")
    assert done.stdout == ANSWER + "\n"
    assert "2 accepted draft" in done.stderr
    assert "\x1b" not in done.output


def test_describe_asks_for_a_description(gateway: ScriptedGateway, video: Path) -> None:
    assert run("describe", video, "--server", gateway.address).stdout == ANSWER + "\n"
    assert gateway.answers.requests[0].question == "Describe the video."


def test_a_path_on_the_server_and_a_context_need_no_upload(gateway: ScriptedGateway) -> None:
    done = run("ask", "day/clip.mp4", "q", "--on-server", "--server", gateway.address, "--json")
    assert gateway.contexts.specs[0].path == "day/clip.mp4"
    name = json.loads(done.stdout)["context"]["name"]
    assert run("ask", name, "q", "--server", gateway.address).exit_code == 0
    assert len(gateway.contexts.specs) == 1


def test_chat_keeps_the_history_and_one_context(gateway: ScriptedGateway, video: Path) -> None:
    done = run("chat", video, "--server", gateway.address, stdin="first\n\n   \nsecond\n/exit\nnever\n")
    assert done.exit_code == 0
    assert done.stdout == f"{ANSWER}\n{ANSWER}\n"
    first, second = gateway.answers.requests
    assert (first.question, len(first.history)) == ("first", 0)
    assert [turn.text for turn in second.history] == ["first", ANSWER]
    assert len(gateway.contexts.specs) == 1


def test_chat_goes_on_after_a_refused_question_and_ends_with_its_input(gateway: ScriptedGateway, video: Path) -> None:
    done = run("chat", video, "--server", gateway.address, "--json", stdin="hot\nq")
    assert done.exit_code == 0
    assert "sampling.temperature: must be >= 0" in done.stderr
    assert json.loads(done.stdout)["text"] == ANSWER
    assert len(gateway.answers.requests[1].history) == 0


@pytest.mark.parametrize(
    ("question", "code", "words"),
    [
        ("hot", 3, "sampling.temperature: must be >= 0"),
        (" ", 3, "question: must not be empty"),
        ("full", 5, "it may work again in 0.5 s"),
        ("cut", 1, "without its statistics"),
    ],
)
def test_errors_of_the_server_have_codes(
    gateway: ScriptedGateway, video: Path, question: str, code: int, words: str
) -> None:
    done = run("ask", video, question, "--server", gateway.address)
    assert done.exit_code == code
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_a_missing_file_is_not_found_and_an_empty_one_invalid(gateway: ScriptedGateway, tmp_path: Path) -> None:
    empty = tmp_path / "[bold]empty.mp4"
    empty.touch()
    missing = run("ask", tmp_path / "none.mp4", "q", "--server", gateway.address, "--json")
    assert missing.exit_code == 4
    assert json.loads(missing.stdout)["error"]["reason"] == "FILE_NOT_FOUND"
    refused = run("ask", empty, "q", "--server", gateway.address)
    assert refused.exit_code == 3
    assert "[bold]empty.mp4 is empty" in refused.stderr


def test_unreachable_deadline_and_usage_have_codes(gateway: ScriptedGateway, video: Path) -> None:
    nobody = run("ask", video, "q", "--server", "127.0.0.1:1")
    assert nobody.exit_code == 6
    assert "no server answers at 127.0.0.1:1" in nobody.stderr
    late = run("ask", video, "slow", "--server", gateway.address, "--deadline", "0.3")
    assert late.exit_code == 7
    assert run("ask", video).exit_code == 2
    assert run("ask", video, "q", "--draft", "magic").exit_code == 2
    assert run("ask", video, "q", "--deadline", "-1").exit_code == 2


def test_a_local_stack_needs_a_model(video: Path, tmp_path: Path) -> None:
    done = run("ask", video, "q", "--model", tmp_path)
    assert done.exit_code == 4
    assert "no checkpoint at" in done.stderr


def test_contexts_are_listed_shown_and_removed(gateway: ScriptedGateway, video: Path) -> None:
    server = ("--server", gateway.address)
    name = json.loads(run("ask", video, "q", *server, "--json").stdout)["context"]["name"]
    assert name in run("contexts", "ls", *server).stdout
    assert json.loads(run("contexts", "ls", *server, "--json").stdout)["contexts"][0]["name"] == name
    assert name not in run("contexts", "ls", *server, "--state", "cold").stdout
    assert name not in run("contexts", "ls", *server, "--sha256", "ab" * 32).stdout
    assert "num_visual_tokens" in run("contexts", "show", name, *server).stdout
    assert json.loads(run("contexts", "show", name, *server, "--json").stdout)["num_visual_tokens"] == 36
    assert json.loads(run("contexts", "pin", name, *server, "--json").stdout)["contexts"][0]["pinned"]
    assert "pinned" in run("contexts", "ls", *server).stdout
    assert "pinned" not in run("contexts", "pin", "--unpin", name, *server).stdout
    assert "pinned" not in run("contexts", "ls", *server).stdout
    assert run("contexts", "rm", name.removeprefix("contexts/"), *server).exit_code == 0
    assert run("contexts", "show", name, *server).exit_code == 4
    assert run("contexts", "show", "videos/a", *server).exit_code == 3


def test_version_tells_ours_and_the_servers(gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("version").stdout == f"foveate {foveate.__version__}\n"
    monkeypatch.setenv("FOVEATE_SERVER", gateway.address)
    assert "tiny on cpu" in run("version").stdout
    assert json.loads(run("version", "--json").stdout)["server"]["model"] == "tiny"


def test_help_lists_commands_and_exit_codes() -> None:
    told = " ".join(run("--help").stdout.split())
    for word in ("up", "ask", "chat", "describe", "contexts", "version", "7 deadline passed", "130 interrupted"):
        assert word in told


def start(*arguments: Any, **streams: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "foveate.cli.main", *map(str, arguments)]
    return subprocess.Popen(command, text=True, **streams)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_signals_end_an_answer_and_cancel_it(gateway: ScriptedGateway, video: Path, number: int, code: int) -> None:
    arguments = ("ask", video, "slow", "--server", gateway.address)
    with start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == "The "
        process.send_signal(number)
        _, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert "Traceback" not in err
    assert gateway.answers.cancelled.wait(2)


def test_ctrl_c_in_a_chat_stops_the_answer_and_the_chat_goes_on(gateway: ScriptedGateway, video: Path) -> None:
    arguments = ("chat", video, "--server", gateway.address)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(*arguments, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("slow\n")
        process.stdin.flush()
        assert process.stdout.read(4) == "The "
        process.send_signal(signal.SIGINT)
        assert gateway.answers.cancelled.wait(5)
        out, err = process.communicate("q\n/exit\n", timeout=10)
    assert process.returncode == 0
    assert out.endswith(f"{ANSWER}\n")
    assert "stopped" in err
    assert [len(request.history) for request in gateway.answers.requests] == [0, 0]


def test_a_closed_pipe_is_no_traceback(gateway: ScriptedGateway, video: Path) -> None:
    arguments = ("ask", video, "slow", "--server", gateway.address)
    with start(*arguments, "--deadline", "3", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert "Traceback" not in err


def test_a_terminal_gets_colours_unless_no_color_says_otherwise(gateway: ScriptedGateway, video: Path) -> None:
    arguments = ("ask", video, "q", "--server", gateway.address, "--explain")
    green, plain = "\x1b[32m", _in_terminal(*arguments, extra_environment={"NO_COLOR": "1"})
    coloured = _in_terminal(*arguments, extra_environment={})
    assert f"{green}red " in coloured
    assert "accepted draft" in coloured
    assert green not in plain
    assert ANSWER in plain


def _in_terminal(*arguments: Any, extra_environment: dict[str, str]) -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", **extra_environment}
    with start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        data, deadline_s = b"", time.monotonic() + 20
        while time.monotonic() < deadline_s:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                data += os.read(ours, 65536)
            except OSError:  # the terminal's other end is closed: the process ended
                break
    os.close(ours)
    assert process.returncode == 0
    return data.decode()
