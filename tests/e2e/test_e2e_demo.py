"""The demo that the README promises: it runs to its end with what is installed, and says how it went."""

import subprocess
import sys


def test_the_demo_asks_three_questions_and_leaves_with_success() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.demo"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of the facts are right") == 3
    assert "accepted draft" in done.stdout
