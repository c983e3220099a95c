"""An optional judge of open answers: any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import dataclass
from urllib.error import URLError

_ASK = """Compare a predicted answer about a video with the correct one. Synonyms and paraphrases count as equal.
Question: {question}
Correct answer: {reference}
Predicted answer: {text}
Reply with one whole number from 0 (nothing matches) to 5 (everything does), and nothing else."""
MAX_SCORE = 5


class JudgeError(Exception):
    """The judge could not be asked, or gave no score."""


@dataclass(frozen=True)
class Judge:
    """`url` is that of the completions, such as http://127.0.0.1:8000/v1/chat/completions. No key is sent."""

    url: str
    model: str
    timeout_s: float = 120.0

    def score(self, question: str, reference: str, text: str) -> float:
        """Returns a score in [0, 1]. Raises JudgeError."""
        prompt = _ASK.format(question=question, reference=reference, text=text)
        body = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": 8,
            "messages": [{"role": "user", "content": prompt}],
        }
        if not self.url.startswith(("http://", "https://")):
            raise JudgeError(f"{self.url} is no http address")
        request = urllib.request.Request(
            self.url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                reply = json.load(response)["choices"][0]["message"]["content"]
        except (URLError, TimeoutError, KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise JudgeError(f"the judge at {self.url} gave no answer: {error}") from error
        found = re.search(r"[0-5]", str(reply))
        if found is None:
            raise JudgeError(f"the judge gave no score but {reply!r}")
        return int(found.group()) / MAX_SCORE
