"""A generic client that has no .proto files and learns everything from reflection: `buf curl`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clients.conftest import TEXT
from tests.fakes import CONTEXT, PROMPT_TEXT

BUF = Path(sys.executable).parent / "buf"


def curl(gateway: str, method: str, request: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", json.dumps(request)]
    url = f"http://{gateway}/foveate.v1.{method}"
    return subprocess.run([*command, url], capture_output=True, text=True, timeout=60, check=False)


def replies(text: str) -> list[dict[str, Any]]:
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def test_it_finds_the_services_by_reflection_and_asks(gateway: str) -> None:
    ran = curl(gateway, "AnswerService/GetServerInfo", {})
    assert json.loads(ran.stdout)["model"] == "toy", ran.stderr
    ran = curl(gateway, "AnswerService/Ask", {"context": CONTEXT, "question": PROMPT_TEXT})
    events = replies(ran.stdout)
    assert "".join(event["delta"].get("text", "") for event in events if "delta" in event) == TEXT
    assert events[-1]["finished"]["finishReason"] == "FINISH_REASON_EOS"


def test_it_reads_rich_errors(gateway: str) -> None:
    ran = curl(gateway, "AnswerService/Ask", {"context": CONTEXT, "question": "", "maxTokens": -1})
    assert ran.returncode != 0
    told = json.loads(ran.stderr)
    assert told["code"] == "invalid_argument"
    kinds = {detail["type"] for detail in told["details"]}
    assert {"google.rpc.ErrorInfo", "google.rpc.BadRequest"} <= kinds
